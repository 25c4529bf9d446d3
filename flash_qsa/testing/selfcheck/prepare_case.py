"""A step for `prepare` at the end of a long context, and the float64 truth of all it writes."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from flash_qsa import dispatch
from flash_qsa.config import RopeConfig
from flash_qsa.ops import compress_keys, prepare
from flash_qsa.ops.compress_keys.ring_rows import ring_width
from flash_qsa.ops.fp8 import from_storage, is_fp8
from flash_qsa.ops.prepare.api import Caches, Norms, Prepared
from flash_qsa.ops.rotary import RopeTable
from flash_qsa.plan import BatchPlan
from flash_qsa.testing.compare import U_FP32, unit_roundoff
from flash_qsa.testing.inputs import Shape, make_plan, scattered_view
from flash_qsa.testing.selfcheck.problem import Setting, bits
from flash_qsa.testing.selfcheck.rounding import Bounded, mean, norm, rotate

EPS = 1e-6
K_SCALE, V_SCALE = 0.25, 0.5
"""FP8 scales of the step; values of a unit normal stay far from ±448 times them."""


def rope_config(shape: Shape, length: int) -> RopeConfig:
    """The rotary embedding of `shape`: a quarter of the main head, three mRoPE axes."""
    rotary = min(shape.head_dim // 4, shape.index_dim) // 2 * 2
    third = rotary // 2 // 3
    section = (rotary // 2 - 2 * third, third, third)
    return RopeConfig(theta=1e7, rotary_dim=rotary, max_positions=length, mrope_section=section)


@dataclass
class PrepareCase:
    """Inputs of one call; the caches hold NaN, and `before` what they held."""

    setting: Setting
    config: RopeConfig
    rope: RopeTable
    plan: BatchPlan
    qkv: torch.Tensor
    index_qk: torch.Tensor
    positions: torch.Tensor  # [T, 1, 3]
    norms: Norms
    caches: Caches
    before: Caches
    members: torch.Tensor  # [n, C, Di] raw keys of the n groups that the step closes
    closing: torch.Tensor  # [n] their rows
    first: torch.Tensor  # [n, 3] rotary positions of their first tokens

    @property
    def real(self) -> int:
        return self.plan.num_tokens

    def run(self) -> Prepared:
        scales = {}
        if is_fp8(self.caches.main.dtype):
            scales = {"k_scale": K_SCALE, "v_scale": V_SCALE}
        seen = prepare(
            self.qkv,
            self.index_qk,
            self.positions,
            self.rope,
            self.norms,
            self.caches,
            self.plan,
            backend=self.setting.backend,
            **scales,
        )
        return Prepared(*(tensor[: self.real] for tensor in seen))

    def compress(self) -> tuple[torch.Tensor, torch.Tensor]:
        return compress_keys(
            self.index_qk[:, -self.setting.shape.index_dim :],
            self.positions,
            self.caches.ring,
            self.plan.ring_table,
            self.plan,
            backend=self.setting.backend,
        )

    def pooled_truth(self) -> tuple[Bounded, torch.Tensor]:
        """Pooled keys [T, Di] and int64 first positions [T, 1, 3] of every row."""
        rows, dtype = self.plan.num_rows, self.setting.dtype
        value = torch.zeros(rows, self.members.shape[2], dtype=torch.float64)
        error = torch.zeros_like(value)
        pooled = mean(self.members.cpu()).rounded(dtype)
        closing = self.closing.cpu()
        value[closing], error[closing] = pooled.value, pooled.error
        first = torch.full((rows, 1, 3), -1, dtype=torch.int64)
        first[closing, 0] = self.first.cpu()
        device = self.setting.device
        return Bounded(value.to(device), error.to(device)), first.to(device)

    def angles(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Table cosines and sines [n, half] at [n, 3] positions, each channel from its axis."""
        half = self.config.rotary_dim // 2
        section = self.config.mrope_section
        axis = [c % 3 if c // 3 < section[c % 3] else 0 for c in range(half)]
        channel = torch.arange(half, device=positions.device)
        rows = positions[:, axis]
        table = self.rope.cos_sin
        return table[rows, channel], table[rows, channel + half]

    def _normed_and_turned(self, x: torch.Tensor, weight: torch.Tensor) -> Bounded:
        dtype = self.setting.dtype
        normed = norm(Bounded.exact(x), weight, EPS, dtype)
        return rotate(normed, *self.angles(self.positions[: self.real, 0]), dtype)

    def query_truth(self) -> tuple[Bounded, Bounded]:
        """Main and index queries of the real rows."""
        shape = self.setting.shape
        q = self._main_parts()[0]
        index = self.index_qk[: self.real, : -shape.index_dim]
        index = index.reshape(self.real, shape.index_heads, shape.index_dim)
        index_query = self._normed_and_turned(index, self.norms.index_query)
        if is_fp8(self.caches.compressed.dtype):
            index_query = index_query.rounded(self.caches.compressed.dtype)
        return self._normed_and_turned(q, self.norms.query), index_query

    def _main_parts(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Raw queries, gates [T, Hq, D], keys and values [T, Hkv, D]."""
        shape, real = self.setting.shape, self.real
        width = shape.heads * 2 * shape.head_dim
        q, gate = self.qkv[:real, :width].reshape(real, shape.heads, 2, shape.head_dim).unbind(2)
        kv = self.qkv[:real, width:].reshape(real, 2, shape.kv_heads, shape.head_dim)
        return q, gate, *kv.unbind(1)

    def compare_parts(
        self, seen: Prepared
    ) -> list[tuple[str, torch.Tensor, torch.Tensor, torch.Tensor]]:
        """(name, result, truth, bound) of everything that the step rounds."""
        dtype, shape = self.setting.dtype, self.setting.shape
        query, index_query = self.query_truth()
        _, _, k, v = self._main_parts()
        main, compressed = self.caches.main, self.caches.compressed
        scales = (K_SCALE, V_SCALE) if is_fp8(main.dtype) else (1.0, 1.0)
        keys = self._normed_and_turned(k, self.norms.key)
        values = Bounded.exact(v)
        if is_fp8(main.dtype):
            keys = keys.rounded(main.dtype, scales[0])
            values = values.rounded(main.dtype, scales[1])

        cells = self.plan.main_slots[: self.real]
        stored = from_storage(main)[cells // shape.page_size, :, cells % shape.page_size]
        pooled = mean(self.members).rounded(dtype)
        block_keys = rotate(
            norm(pooled, self.norms.index_key, EPS, dtype), *self.angles(self.first), dtype
        )
        if is_fp8(compressed.dtype):
            block_keys = block_keys.rounded(compressed.dtype)
        slots, per_page = self.plan.compressed_slots[self.closing], compressed.shape[1]
        written = from_storage(compressed)[slots // per_page, slots % per_page, 0]
        return [
            ("query", seen.query, query.value, query.error),
            ("index_query", from_storage(seen.index_query), index_query.value, index_query.error),
            ("main keys", stored[..., : shape.head_dim], keys.value, keys.error),
            ("main values", stored[..., shape.head_dim :], values.value, values.error),
            ("compressed keys", written, block_keys.value, block_keys.error),
        ]

    def moved_parts(self, seen: Prepared) -> list[tuple[str, torch.Tensor, torch.Tensor]]:
        """(name, result, truth) of everything that must be copied, or left alone, bit for bit."""
        shape, ring = self.setting.shape, self.before.ring.clone()
        key = self.index_qk[: self.real, -shape.index_dim :]
        slots = self.plan.ring_slots[: self.real]
        kept = slots >= 0
        rows = torch.zeros(int(kept.sum()), ring.shape[3], dtype=ring.dtype, device=ring.device)
        rows[:, : shape.index_dim] = key[kept]
        at = self.positions[: self.real, 0][kept].contiguous()
        rows[:, ring.shape[3] - 24 // ring.dtype.itemsize :] = at.view(ring.dtype)
        capacity = ring.shape[1]
        ring[slots[kept] // capacity, slots[kept] % capacity, 0] = rows

        parts = [("gate", seen.gate, self._main_parts()[1]), ("ring", self.caches.ring, ring)]
        main, size = bits(self.before.main).clone(), shape.page_size
        cells = self.plan.main_slots[: self.real]
        after = bits(self.caches.main)
        main[cells // size, :, cells % size] = after[cells // size, :, cells % size]
        parts.append(("main cells of other tokens", after, main))
        compressed, per_page = bits(self.before.compressed).clone(), size // shape.ratio
        cells = self.plan.compressed_slots[self.closing]
        after = bits(self.caches.compressed)
        compressed[cells // per_page, cells % per_page] = after[cells // per_page, cells % per_page]
        parts.append(("compressed cells of other blocks", after, compressed))
        return parts

    def table_parts(self) -> tuple[str, torch.Tensor, torch.Tensor, torch.Tensor]:
        """The table at the ends of the context against float64 angles.

        An angle is an FP32 product with a frequency that took a power and a division: eight
        roundings at most, each a share of the angle itself.
        """
        length, dim = self.config.max_positions, self.config.rotary_dim
        at = torch.tensor(sorted({0, 1, length // 2, length - 1}))
        frequency = self.config.theta ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)
        angle = at[:, None] * frequency
        truth = torch.cat((angle.cos(), angle.sin()), -1)
        u = unit_roundoff(self.setting.dtype)
        bound = torch.cat((angle, angle), -1) * 8 * U_FP32 + u + 4 * U_FP32
        device = self.setting.device
        seen = self.rope.cos_sin[at.to(device)]
        return "cos_sin", seen, truth.to(device), bound.to(device)


def make_prepare_case(
    setting: Setting,
    length: int,
    *,
    rotary_zero: bool = False,
    unit: bool = False,
    fp8: bool = False,
) -> PrepareCase:
    """One decode row that closes a group out of its ring, then the last rows of a prefill.

    Args:
        rotary_zero: all rotary positions are 0, where the rotation is the identity.
        unit: all entries are ±1 and all norm weights 0, where the norm is the identity.
        fp8: main and compressed caches in FP8.
    """
    shape, dtype, device = setting.shape, setting.dtype, setting.device
    generator = torch.Generator().manual_seed(setting.seed + length)
    ratio, size, capacity = shape.ratio, shape.page_size, shape.ring_capacity
    lengths = [max(length // ratio * ratio, ratio), length]
    queries = [1, min(length, max(setting.rows, 2 * ratio + 3))]
    columns = -(-max(lengths) // size)
    pages = torch.randperm(columns + 2, generator=generator).int()
    table = torch.full((2, columns), -1, dtype=torch.int32)
    table[1] = pages[:columns]
    table[0, (lengths[0] - 1) // size] = pages[columns]
    slots = torch.tensor([[2], [0]], dtype=torch.int32)
    with dispatch.trace():  # ops that only make inputs are not what ran
        plan = make_plan(queries, lengths, table, shape, ring_table=slots, padding=1, device=device)

    def draw(*sizes: int) -> torch.Tensor:
        values = torch.randn(*sizes, generator=generator)
        return (values.sign() if unit else values).to(dtype)

    def padded(width: int) -> torch.Tensor:
        values = torch.full((sum(queries) + 1, width), float("nan"), dtype=dtype)
        values[:-1] = draw(sum(queries), width)
        return values

    qkv = padded((shape.heads + shape.kv_heads) * 2 * shape.head_dim)
    index_qk = padded((shape.index_heads + 1) * shape.index_dim)

    def axes(logical: torch.Tensor) -> torch.Tensor:
        """Three different positions for each token, as an image's tokens have."""
        three = torch.stack((logical, logical // 2, (logical - 5).clamp(min=0)), -1)
        return torch.zeros_like(three) if rotary_zero else three

    logical = plan.positions.cpu().clamp(min=0)
    positions = axes(logical)[:, None]
    width = ring_width(shape.index_dim, dtype, True)
    ring = torch.full((4, capacity, 1, width), float("nan"), dtype=dtype)
    raw = index_qk[:, -shape.index_dim :]
    members, closing, first = [], [], []
    row = 0
    for request, (total, count) in enumerate(zip(lengths, queries)):
        start = total - count
        history = {p: draw(shape.index_dim) for p in range(start // ratio * ratio, start)}
        for p, key in history.items():
            cell = ring[int(slots[request, 0]), p % capacity, 0]
            cell[: shape.index_dim] = key
            at = axes(torch.tensor([p]))[0].contiguous()
            cell[width - 24 // dtype.itemsize :] = at.view(dtype)
        for p in range(start, total):
            if (p + 1) % ratio == 0:
                group = range(p + 1 - ratio, p + 1)
                members.append(
                    torch.stack([history[m] if m < start else raw[row + m - start] for m in group])
                )
                closing.append(row + p - start)
                first.append(axes(torch.tensor([p + 1 - ratio]))[0])
        row += count

    def gain(dim: int) -> torch.Tensor:
        values = torch.randn(dim, generator=generator) * 0.2
        return (torch.zeros(dim) if unit else values).to(device, dtype)

    stored = setting.fp8 if fp8 else dtype
    caches = Caches(
        _spoiled((columns + 2, shape.kv_heads, size, 2 * shape.head_dim), stored, device),
        _spoiled((columns + 2, size // ratio, 1, shape.index_dim), stored, device),
        ring.to(device),
    )
    config = rope_config(shape, max(lengths))
    return PrepareCase(
        setting,
        config,
        RopeTable.from_config(config, dtype, device),
        plan,
        scattered_view(qkv.to(device)),
        scattered_view(index_qk.to(device)),
        positions.to(device),
        Norms(*(gain(d) for d in (shape.index_dim,) * 2 + (shape.head_dim,) * 2), EPS),
        caches,
        Caches(*(cache.clone() for cache in caches)),
        torch.stack(members).to(device),
        torch.tensor(closing, device=device),
        torch.stack(first).to(device),
    )


def _spoiled(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A cache of NaN in every dtype (0x7F is e4m3's)."""
    if is_fp8(dtype):
        return torch.full(shape, 0x7F, dtype=torch.uint8, device=device).view(dtype)
    return torch.full(shape, float("nan"), dtype=dtype, device=device)
