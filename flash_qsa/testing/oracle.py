"""The from-scratch oracle: one QSA layer's core for one request, in float64, without any cache.

It starts from the projections of the *whole* token list and shares no mathematics with the ops:
norms, rotation, pooling, selection and attention are written out again, token by token. Slow, and
meant to be.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from flash_qsa.ops.prepare.api import Norms
from flash_qsa.ops.rotary import RopeTable


@dataclass(frozen=True)
class OracleRows:
    """What each of n tokens contributes, float64: query and gate [n, Hq, D], key and value
    [n, Hkv, D], index_query [n, Hi, Di], raw_key [n, Di]."""

    query: torch.Tensor
    gate: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    index_query: torch.Tensor
    raw_key: torch.Tensor


@dataclass(frozen=True)
class OracleResult:
    """A whole request.

    Attributes:
        rows: per-token inputs of selection and attention.
        block_keys: [n // C, Di].
        scores: float64 [visible] of each row.
        selected: ascending block ids of each row.
        tokens: what each row attends, ascending.
        out: [n, Hq, D], gated.
    """

    rows: OracleRows
    block_keys: torch.Tensor
    scores: list[torch.Tensor]
    selected: list[list[int]]
    tokens: list[list[int]]
    out: torch.Tensor


@dataclass(frozen=True)
class Oracle:
    """One layer: its weights and geometry.

    Attributes:
        rope, norms: the layer's own; their values are taken as they are, in float64.
        heads, kv_heads, head_dim, index_heads, index_dim: Hq, Hkv, D, Hi, Di.
        ratio, top_k: C, K.
        scale: softmax scale, D ** -0.5 by default.
        round_to: round where the specification rounds (after each norm, rotation and pooling, and
            before the gate), as an implementation in that dtype must; None keeps float64.
    """

    rope: RopeTable
    norms: Norms
    heads: int
    kv_heads: int
    head_dim: int
    index_heads: int
    index_dim: int
    ratio: int
    top_k: int
    scale: float | None = None
    round_to: torch.dtype | None = None

    def run(
        self, qkv: torch.Tensor, index_qk: torch.Tensor, positions: torch.Tensor
    ) -> OracleResult:
        """The layer over all n tokens of a request, in order.

        Args:
            qkv: [n, Hq·2·D + 2·Hkv·D]; index_qk: [n, (Hi + 1)·Di]; as `ops.prepare` takes them.
            positions: rotary positions, int64 [n] or [n, 3] (T, H, W axes).
        """
        rows = self.rows(qkv, index_qk, positions)
        block_keys = self.block_keys(rows.raw_key, positions)
        scores, selected, tokens, out = [], [], [], []
        for token in range(qkv.shape[0]):
            visible = (token + 1) // self.ratio
            scores.append(self.scores(rows.index_query[token], block_keys[:visible]))
            selected.append(self.select(scores[-1]))
            tokens.append(self.attended(selected[-1], token))
            out.append(
                self.attend(rows.query[token], rows.gate[token], rows.key, rows.value, tokens[-1])
            )
        shape = (0, self.heads, self.head_dim)
        outputs = torch.stack(out) if out else torch.zeros(shape, dtype=torch.float64)
        return OracleResult(rows, block_keys, scores, selected, tokens, outputs)

    def rows(
        self, qkv: torch.Tensor, index_qk: torch.Tensor, positions: torch.Tensor
    ) -> OracleRows:
        """Splits, norms and rotates the projections of n tokens."""
        count, dim = qkv.shape[0], self.head_dim
        qkv, index_qk = qkv.double(), index_qk.double()
        paired = qkv[:, : self.heads * 2 * dim].reshape(count, self.heads, 2, dim)
        packed = qkv[:, self.heads * 2 * dim :].reshape(count, 2, self.kv_heads, dim)
        heads = index_qk.reshape(count, self.index_heads + 1, self.index_dim)
        return OracleRows(
            query=self._norm_rotate(paired[:, :, 0], self.norms.query, positions),
            gate=paired[:, :, 1],
            key=self._norm_rotate(packed[:, 0], self.norms.key, positions),
            value=packed[:, 1],
            index_query=self._norm_rotate(
                heads[:, : self.index_heads], self.norms.index_query, positions
            ),
            raw_key=heads[:, self.index_heads],
        )

    def block_keys(self, raw_keys: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Compressed keys [n // C, Di] of raw keys [n, Di]; a trailing open group has none."""
        blocks = raw_keys.shape[0] // self.ratio
        pooled = torch.zeros(blocks, 1, self.index_dim, dtype=torch.float64)
        for block in range(blocks):
            for member in range(block * self.ratio, (block + 1) * self.ratio):
                pooled[block, 0] += raw_keys[member]
        first = positions[: blocks * self.ratio : self.ratio]
        mean = self._rounded(pooled / self.ratio)
        return self._norm_rotate(mean, self.norms.index_key, first)[:, 0]

    def scores(self, index_query: torch.Tensor, block_keys: torch.Tensor) -> torch.Tensor:
        """Σ over heads of relu(q · k): [N] for one row's [Hi, Di] and keys [N, Di]."""
        total = torch.zeros(block_keys.shape[0], dtype=torch.float64)
        for head in range(self.index_heads):
            total += (block_keys @ index_query[head]).clamp(min=0)
        return total

    def select(self, scores: torch.Tensor) -> list[int]:
        """The K best blocks under (score descending, id ascending), in ascending order."""
        values = scores.tolist()
        ranked = sorted(range(len(values)), key=lambda block: (-values[block], block))
        return sorted(ranked[: self.top_k])

    def attended(self, selected: list[int], token: int) -> list[int]:
        """Tokens that a row attends: its blocks' and those of the open group up to itself."""
        tokens = [block * self.ratio + i for block in selected for i in range(self.ratio)]
        return tokens + list(range((token + 1) // self.ratio * self.ratio, token + 1))

    def attend(
        self,
        query: torch.Tensor,
        gate: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        tokens: list[int],
    ) -> torch.Tensor:
        """Gated attention [Hq, D] of one row over `tokens` of keys and values [n, Hkv, D]."""
        scale = self.head_dim**-0.5 if self.scale is None else self.scale
        group = self.heads // self.kv_heads
        out = torch.zeros(self.heads, self.head_dim, dtype=torch.float64)
        if not tokens:
            return out
        for kv_head in range(self.kv_heads):
            shared = slice(kv_head * group, (kv_head + 1) * group)
            weights = (query[shared] @ keys[tokens, kv_head].t() * scale).softmax(-1)
            out[shared] = weights @ values[tokens, kv_head]
        return self._rounded(out) * torch.sigmoid(gate)

    def _norm_rotate(
        self, x: torch.Tensor, weight: torch.Tensor, positions: torch.Tensor
    ) -> torch.Tensor:
        """Zero-centred RMSNorm and RoPE of x [n, heads, dim] at positions [n] or [n, 3]."""
        mean_square = (x * x).sum(-1, keepdim=True) / x.shape[-1]
        normed = self._rounded(x / (mean_square + self.norms.eps).sqrt() * (1 + weight.double()))
        half = self.rope.rotary_dim // 2
        if positions.dim() == 1:
            positions = positions[:, None].expand(-1, 3)
        rotated = normed.clone()
        for channel in range(half):
            table = self.rope.cos_sin[positions[:, self._axis(channel)]].double()
            cos, sin = table[:, None, channel], table[:, None, half + channel]
            one, other = (
                (channel, channel + half)
                if self.rope.neox_style
                else (2 * channel, 2 * channel + 1)
            )
            first, second = normed[..., one], normed[..., other]
            rotated[..., one] = first * cos - second * sin
            rotated[..., other] = second * cos + first * sin
        return self._rounded(rotated)

    def _axis(self, channel: int) -> int:
        """Which of the T, H, W positions turns a frequency channel."""
        section = self.rope.mrope_section
        if section is None:
            return 0
        if self.rope.mrope_interleaved:
            axis, turn = channel % 3, channel // 3
            return axis if axis and turn < section[axis] else 0
        return 0 if channel < section[0] else 1 if channel < section[0] + section[1] else 2

    def _rounded(self, x: torch.Tensor) -> torch.Tensor:
        return x if self.round_to is None else x.to(self.round_to).double()
