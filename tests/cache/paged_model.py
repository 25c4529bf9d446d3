"""A few QSA layers over one QSACache, every result compared with the from-scratch oracle.

A token is an id and three rotary positions. Its projections are looked up in a table, so that the
same token always gives the same rows, as in a model. The oracle's rows are kept per request and
only extended, which makes thousands of comparisons cheap; they never come from the caches.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch
from cache_bounds import Bounds

from flash_qsa.cache import QSACache, RequestSnapshot
from flash_qsa.config import QSAConfig, RopeConfig
from flash_qsa.ops import prepare, select_blocks, sparse_attention
from flash_qsa.ops.compress_keys.ring_rows import unpack_positions
from flash_qsa.ops.prepare.api import Norms
from flash_qsa.ops.rotary import RopeTable
from flash_qsa.testing.compare import assert_selection, assert_within
from flash_qsa.testing.oracle import Oracle, OracleRows

VOCABULARY = 509
Token = tuple[int, tuple[int, int, int]]


@dataclass
class History:
    """The oracle's view of one layer of one request."""

    rows: OracleRows
    block_keys: torch.Tensor

    def cut(self, length: int, ratio: int) -> History:
        fields = {name: rows[:length] for name, rows in vars(self.rows).items()}
        return History(OracleRows(**fields), self.block_keys[: length // ratio])


@dataclass
class Text:
    """The tokens of a request and what the oracle makes of them, a layer each."""

    tokens: list[Token]
    layers: list[History]

    def cut(self, length: int, ratio: int) -> Text:
        return Text(self.tokens[:length], [layer.cut(length, ratio) for layer in self.layers])


class PagedModel:
    """Layers, their cache, and a `Text` for every request in it."""

    def __init__(
        self,
        *,
        num_layers: int = 1,
        num_pages: int = 32,
        page_size: int = 8,
        num_ring_slots: int = 8,
        draft_tokens: int = 0,
        ratio: int = 4,
        budget: int = 16,
        dtype: torch.dtype = torch.float32,
        mrope: bool = True,
        reserve_null: bool = True,
        max_positions: int = 1024,
        head_dim: int = 8,
        deterministic: bool = False,
        device: str = "cpu",
        seed: int = 0,
    ) -> None:
        self.deterministic, self.device = deterministic, device
        half = head_dim * 3 // 8
        section = (half - 2 * (half // 3), half // 3, half // 3) if mrope else None
        self.config = config = QSAConfig(
            hidden_size=32,
            num_heads=4,
            num_kv_heads=2,
            head_dim=head_dim,
            index_heads=2,
            index_head_dim=head_dim,
            token_budget=budget,
            compress_ratio=ratio,
            rope=RopeConfig(
                rotary_dim=2 * half, max_positions=max_positions, mrope_section=section
            ),
        )
        self.cache = QSACache.from_config(
            config,
            num_layers=num_layers,
            num_pages=num_pages,
            page_size=page_size,
            num_ring_slots=num_ring_slots,
            dtype=dtype,
            draft_tokens=draft_tokens,
            reserve_null=reserve_null,
            device=device,
        )
        self.dtype, self.random = dtype, random.Random(seed)
        generator = torch.Generator().manual_seed(seed)

        def draw(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator).to(dtype)

        self.rope = RopeTable.from_config(config.rope, dtype)
        self.bounds = Bounds(dtype, config.head_dim, ratio)
        heads, kv_heads, dim = config.num_heads, config.num_kv_heads, config.head_dim
        index_heads, index_dim = config.index_heads, config.index_head_dim
        self.qkv, self.index_qk, self.norms, self.oracles = [], [], [], []
        for _ in range(num_layers):
            self.qkv.append(draw(VOCABULARY, heads * 2 * dim + 2 * kv_heads * dim))
            self.index_qk.append(draw(VOCABULARY, (index_heads + 1) * index_dim))
            norms = [draw(size) * 0.2 for size in (index_dim, index_dim, dim, dim)]
            self.norms.append(Norms(*norms, config.rms_norm_eps))
            self.oracles.append(
                Oracle(
                    self.rope,
                    self.norms[-1],
                    heads,
                    kv_heads,
                    dim,
                    index_heads,
                    index_dim,
                    ratio,
                    config.top_k,
                )
            )
        on_device = RopeTable.from_config(config.rope, dtype, device)
        self.weights = [(on_device, self._moved(norms)) for norms in self.norms]
        self.texts: dict[object, Text] = {}
        self.poison()

    def _moved(self, norms: Norms) -> Norms:
        return Norms(*(weight.to(self.device) for weight in norms[:4]), norms.eps)

    def draw_tokens(self, count: int, start: int = 0) -> list[Token]:
        """Random tokens; positions are arbitrary where axes differ, the index otherwise."""
        if self.config.rope.mrope_section is None:
            return [(self.random.randrange(VOCABULARY), (start + i,) * 3) for i in range(count)]
        limit = self.config.rope.max_positions
        return [
            (
                self.random.randrange(VOCABULARY),
                tuple(self.random.randrange(limit) for _ in range(3)),
            )
            for _ in range(count)
        ]

    def admit(self, request: object) -> None:
        self.cache.allocate(request)
        self.texts[request] = self.empty_text()

    def fill(self, request: object, tokens: list[Token]) -> None:
        """A long prefix: admits the request and writes its state, without attention."""
        self.admit(request)
        self.forward({request: tokens}, attend=False)

    def length(self, request: object) -> int:
        return len(self.texts[request].tokens)

    def truncate(self, request: object, length: int, **options) -> int:
        kept = self.cache.truncate(request, length, **options)
        self.texts[request] = self.texts[request].cut(kept, self.config.compress_ratio)
        return kept

    def fork(self, parent: object, child: object, length: int | None = None, **options) -> int:
        kept = self.cache.fork(parent, child, length, **options)
        self.texts[child] = self.texts[parent].cut(kept, self.config.compress_ratio)
        return kept

    def restore(self, request: object, saved: RequestSnapshot, text: Text) -> None:
        self.cache.restore(request, saved)
        self.texts[request] = text.cut(saved.length, self.config.compress_ratio)

    def free(self, request: object) -> None:
        self.cache.free(request)
        del self.texts[request]

    def forward(
        self,
        new: dict[object, list[Token]],
        *,
        padding: int = 0,
        num_decodes: int | None = None,
        check: bool = True,
        attend: bool = True,
    ) -> list[torch.Tensor]:
        """Runs one step on every layer; outputs [T, Hq, D] per layer, each row compared with the
        oracle where `check` says so. Without `attend` the step only writes the caches."""
        steps = self.cache.append({request: len(tokens) for request, tokens in new.items()})
        total = sum(len(tokens) for tokens in new.values())
        plan = self.cache.plan(steps, num_rows=total + padding, num_decodes=num_decodes)
        before = {request: self.length(request) for request in new}
        self._extend(new)
        flat = [token for tokens in new.values() for token in tokens] + [(0, (-7,) * 3)] * padding
        ids = torch.tensor([token for token, _ in flat], dtype=torch.int64)
        positions = torch.tensor([at for _, at in flat], dtype=torch.int64).view(-1, 3)
        outputs = []
        for layer, caches in enumerate(self.cache.layers):
            qkv, index_qk = self.qkv[layer][ids], self.index_qk[layer][ids]
            qkv[total:], index_qk[total:] = torch.nan, torch.nan
            done = prepare(
                qkv.to(self.device),
                index_qk.to(self.device),
                positions.t().contiguous().to(self.device),
                *self.weights[layer],
                caches,
                plan,
            )
            if not attend:
                continue
            block_ids = select_blocks(
                done.index_query,
                caches.compressed,
                plan.page_table,
                plan.request_ids,
                plan.visible_blocks,
                self.config.top_k,
                plan=plan,
            )
            out = sparse_attention(
                done.query,
                caches.main,
                block_ids,
                plan.positions,
                plan.page_table,
                plan.request_ids,
                compress_ratio=self.config.compress_ratio,
                gate=done.gate,
                plan=plan,
                deterministic=self.deterministic,
            )
            if check:
                self._compare(layer, new, before, block_ids.cpu(), out.cpu())
            outputs.append(out[:total])
        return outputs

    def poison(self) -> None:
        """NaN in every cell of every layer that no live request may read."""
        spec, ledger = self.cache.spec, self.cache.ledger
        tokens = torch.zeros(spec.num_pages, spec.page_size, dtype=torch.bool)
        blocks = torch.zeros(spec.num_pages, spec.blocks_per_page, dtype=torch.bool)
        raw = torch.zeros(spec.num_ring_slots, spec.ring_capacity, dtype=torch.bool)
        for state in ledger.requests.values():
            for column, page in enumerate(state.pages):
                left = state.length - column * spec.page_size
                tokens[page, : max(left, 0)] = True
                blocks[page, : max(left, 0) // spec.compress_ratio] = True
            held = torch.arange(state.raw_from, state.length) % spec.ring_capacity
            raw[state.ring_slot, held] = True
        tokens, blocks, raw = (mask.to(self.device) for mask in (tokens, blocks, raw))
        for layer in self.cache.layers:
            layer.main.masked_fill_(~tokens[:, None, :, None], torch.nan)
            layer.compressed.masked_fill_(~blocks[:, :, None, None], torch.nan)
            layer.ring.masked_fill_(~raw[:, :, None, None], torch.nan)

    def check_state(self, request: object) -> None:
        """Compares all state of a request with the oracle: K, V, block keys, live ring rows."""
        saved, text = self.cache.export(request, device="cpu"), self.texts[request]
        assert saved.length == len(text.tokens)
        dim, ratio = self.config.head_dim, self.config.compress_ratio
        for layer, history in enumerate(text.layers):
            main = saved.tensors[f"layers.{layer}.main"]
            truth = history.rows.key
            assert_within(main[..., :dim], truth, self.bounds.vector(truth, dim))
            assert torch.equal(main[..., dim:].double(), history.rows.value)

            compressed, truth = saved.tensors[f"layers.{layer}.compressed"], history.block_keys
            assert compressed.shape[0] == saved.length // ratio
            grown = self.bounds.pooling_growth(history.rows.raw_key)
            assert_within(
                compressed, truth, self.bounds.vector(truth, self.config.index_head_dim, grown)
            )

            ring = saved.tensors[f"layers.{layer}.ring"]
            index_dim = self.config.index_head_dim
            raw = history.rows.raw_key[saved.raw_from :]
            assert torch.equal(ring[:, :index_dim].double(), raw)
            if self.cache.spec.stores_positions:
                held = [list(at) for _, at in text.tokens[saved.raw_from :]]
                assert unpack_positions(ring, index_dim).tolist() == held

    def empty_text(self) -> Text:
        """A text without tokens."""
        nothing, layers = torch.zeros(0, dtype=torch.int64), []
        for layer, oracle in enumerate(self.oracles):
            rows = oracle.rows(
                self.qkv[layer][nothing], self.index_qk[layer][nothing], torch.zeros(0, 3).long()
            )
            layers.append(History(rows, oracle.block_keys(rows.raw_key, nothing)))
        return Text([], layers)

    def _extend(self, new: dict[object, list[Token]]) -> None:
        """The oracle's rows of a step, and the keys of the groups that it closes."""
        ratio = self.config.compress_ratio
        flat = [token for tokens in new.values() for token in tokens]
        ids = torch.tensor([token for token, _ in flat], dtype=torch.int64)
        at = torch.tensor([place for _, place in flat], dtype=torch.int64).view(-1, 3)
        for layer, oracle in enumerate(self.oracles):
            fresh = vars(oracle.rows(self.qkv[layer][ids], self.index_qk[layer][ids], at))
            start = 0
            for request, tokens in new.items():
                text = self.texts[request]
                history, end = text.layers[layer], start + len(tokens)
                rows = OracleRows(
                    **{
                        name: torch.cat((past, fresh[name][start:end]))
                        for name, past in vars(history.rows).items()
                    }
                )
                open_from = len(text.tokens) // ratio * ratio
                places = [place for _, place in text.tokens[open_from:] + tokens]
                places = torch.tensor(places, dtype=torch.int64).view(-1, 3)
                keys = history.block_keys
                if len(places) >= ratio:
                    closed = oracle.block_keys(rows.raw_key[open_from:], places)
                    keys = torch.cat((keys, closed))
                text.layers[layer] = History(rows, keys)
                start = end
        for request, tokens in new.items():
            self.texts[request].tokens = self.texts[request].tokens + tokens

    def _compare(
        self,
        layer: int,
        new: dict[object, list[Token]],
        before: dict[object, int],
        block_ids: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        oracle, chosen = self.oracles[layer], block_ids.tolist()
        truths, bounds = [], []
        for request, tokens in new.items():
            history = self.texts[request].layers[layer]
            rows = history.rows
            for token in range(before[request], before[request] + len(tokens)):
                row = len(truths)
                keys = history.block_keys[: (token + 1) // oracle.ratio]
                scores = oracle.scores(rows.index_query[token], keys)
                picked = [block for block in chosen[row] if block >= 0]
                if picked != oracle.select(scores):
                    slack = self.bounds.scores(rows, token, keys)
                    visible = torch.tensor([keys.shape[0]])
                    assert_selection(block_ids[row : row + 1], scores[None], slack[None], visible)
                attended = oracle.attended(picked, token)
                truths.append(
                    oracle.attend(
                        rows.query[token], rows.gate[token], rows.key, rows.value, attended
                    )
                )
            bounds.append(self.bounds.attention(rows, before[request]))
        if truths:
            truth = torch.stack(truths)
            bound = torch.cat(bounds)[:, None, None].expand_as(truth)
            assert_within(out[: len(truths)], truth, bound)
