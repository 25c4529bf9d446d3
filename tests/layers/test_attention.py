"""QSAAttention: one step of an engine, on poisoned paged state.

Claims:
* prefill, chunked prefill, mixed batches and decode give what whole sequences give, and so do
  projections handed in, a packed projection, and preparation by separate ops;
* padded rows are ignored wherever they appear, a dummy step gives zeros and empties its rows;
* reuse attends every token since the selecting step's last complete block, while the state moves
  on; rows move together with their counts;
* the schedule's hints, the batch and the backend's determinism never change a result's meaning;
* caches of every dtype, with scales; a layer made on the meta device; refusals by name.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch._dynamo.testing
from layer_engine import Engine, same_bits, small_config

from flash_qsa import ops
from flash_qsa.config import RopeConfig
from flash_qsa.layers import QSAAttention
from flash_qsa.layers.cache_dtypes import (
    index_cache_dtype,
    layer_cache_dtype,
    main_cache_dtype,
)
from flash_qsa.ops.prepare.api import Caches

E4M3 = torch.float8_e4m3fn


def make_layer(config=None, seed: int = 1, **options) -> QSAAttention:
    torch.manual_seed(seed)
    layer = QSAAttention(config or small_config(), **options).eval()
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return layer.requires_grad_(False)


def tokens(config, lengths: list[int]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Hidden states and mRoPE positions of a few requests."""
    hidden = [torch.randn(n, config.hidden_size) for n in lengths]
    at = [
        torch.stack([torch.arange(n), torch.arange(n) + 3, torch.arange(n) // 2]) for n in lengths
    ]
    return hidden, at


def whole(layer: QSAAttention, hidden, at) -> list[torch.Tensor]:
    """Each request alone, without any cache."""
    return [
        layer(x, p, query_start=torch.tensor([0, len(x)], dtype=torch.int32))
        for x, p in zip(hidden, at)
    ]


def run_step(layer, engine, hidden, at, rows: dict[int, int], padding: int = 0, **options):
    """One step; returns each request's output rows."""
    before = dict(enumerate(engine.lengths))
    spans = [(r, slice(before[r], before[r] + n)) for r, n in rows.items()]
    x = torch.cat([hidden[r][span] for r, span in spans])
    p = torch.cat([at[r][:, span] for r, span in spans], 1)
    x = torch.cat([x, x.new_full((padding, x.shape[1]), float("nan"))])
    p = torch.cat([p, torch.full((3, padding), -(10**9))], 1)
    plan = engine.plan(rows, padding)
    out = layer(x, p, plan=plan, caches=engine.caches, **options)
    assert out.shape == (len(x), layer.config.hidden_size)
    assert (out[plan.num_tokens :] == 0).all()
    return out[: plan.num_tokens].split(list(rows.values()))


@pytest.mark.parity("P10", "P15", "P38")
@pytest.mark.parametrize("options", [{}, {"pack_projections": True}, {"fused_preparation": False}])
def test_chunks_and_mixed_batches_equal_whole_sequences(options: dict) -> None:
    config = small_config()
    lengths = [61, 33, 70]
    hidden, at = tokens(config, lengths)
    expected = whole(make_layer(config), hidden, at)
    layer = make_layer(config)
    if options:
        other = QSAAttention(config, **options)
        other.load_state_dict(layer.state_dict())
        layer = other.requires_grad_(False)
    engine, got = Engine(config), [[], [], []]
    steps = [{0: 30}, {0: 1, 1: 13}, {0: 1, 1: 1, 2: 47}, {0: 1, 1: 2, 2: 3}]
    while steps or any(engine.lengths[r] < n for r, n in enumerate(lengths)):
        rows = steps.pop(0) if steps else {}
        rows = rows or {r: 1 for r, n in enumerate(lengths) if engine.lengths[r] < n}
        for r, out in zip(rows, run_step(layer, engine, hidden, at, rows, padding=2)):
            got[r].append(out)
    for mine, theirs in zip(got, expected):
        torch.testing.assert_close(torch.cat(mine), theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parity("P12", "P15", "P16", "P30", "P31", "P42", "P49")
@pytest.mark.parametrize(
    "rope, sizes, main_dtype",
    [
        ({"mrope_section": (2, 1, 1)}, {}, None),
        ({"mrope_section": (2, 1, 1), "mrope_interleaved": False}, {}, E4M3),
        ({"neox_style": False}, {}, torch.uint8),
        ({"rotary_dim": 6}, {"index_head_dim": 24}, None),
        ({}, {"compress_ratio": 3, "token_budget": 9}, None),
        ({}, {"compress_ratio": 1, "token_budget": 5}, E4M3),
    ],
)
def test_fused_and_separate_preparation_leave_the_same_bytes(rope, sizes, main_dtype) -> None:
    config = small_config(
        **sizes, rope=RopeConfig(**{"rotary_dim": 8, "max_positions": 256, **rope})
    )
    hidden, at = tokens(config, [40, 21])
    results = []
    for fused in (True, False):
        layer = make_layer(config, fused_preparation=fused)
        layer.k_scale.fill_(0.25)
        layer.v_scale.fill_(0.5)
        torch.manual_seed(3)
        engine = Engine(config, main_dtype=main_dtype, page_size=2 * config.compress_ratio)
        outs = [
            out
            for rows in ({0: 18, 1: 2}, {0: 1, 1: 19}, {0: 20}, {0: 1})
            for out in run_step(layer, engine, hidden, at, rows, padding=1)
        ]
        results.append((torch.cat(outs), engine.caches))
    assert same_bits(results[0][0], results[1][0])
    assert not results[0][0].isnan().any()
    assert all(same_bits(a, b) for a, b in zip(results[0][1], results[1][1]))


@pytest.mark.parity("P11")
def test_projections_handed_in_and_forms_of_positions() -> None:
    config = small_config(rope=RopeConfig(rotary_dim=8, max_positions=256))
    layer, hidden = make_layer(config), torch.randn(25, config.hidden_size)
    at = torch.arange(25)
    outputs = []
    forms = (at, at[None], at.expand(3, -1), at[:, None, None].expand(-1, 1, 3))
    for index, positions in enumerate(forms):
        engine = Engine(config)
        plan = engine.plan({0: 25})
        given = {}
        if index:
            qkv, index_qk = layer.project(hidden)
            given = {"qkv": qkv, "index_qk": index_qk}
        x = None if index else hidden
        outputs.append(layer(x, positions, plan=plan, caches=engine.caches, **given))
    assert all(same_bits(outputs[0], other) for other in outputs[1:])
    with pytest.raises(ValueError, match="^positions: expected shape"):
        layer(hidden, at.view(5, 5), plan=plan, caches=engine.caches)


@pytest.mark.parity("P09")
def test_a_step_without_metadata() -> None:
    layer = make_layer(max_batched_tokens=6)
    layer.indexer.selection.fill_(7)
    hidden = torch.full((4, layer.config.hidden_size), float("nan"))
    assert (layer(hidden, reuse=True) == 0).all()
    assert (layer.indexer.selection == 7).all()
    assert (layer(hidden) == 0).all()
    assert (layer.indexer.selection[:4, :-1] == -1).all()
    assert (layer.indexer.selection[:4, -1] == 0).all()
    assert (layer.indexer.selection[4:] == 7).all()
    rows = torch.full((4, layer.config.top_k + 1), 9, dtype=torch.int32)
    layer(hidden, selection=rows)
    assert (rows[:, :-1] == -1).all() and (rows[:, -1] == 0).all()


@pytest.mark.parity("P41")
def test_a_step_without_rows() -> None:
    layer, engine = make_layer(), Engine(small_config())
    plan = engine.plan({})
    out = layer(torch.empty(0, 48), torch.empty(3, 0), plan=plan, caches=engine.caches)
    assert out.shape == (0, 48)


@pytest.mark.parity("P17", "P33")
@pytest.mark.bug("O-19")
def test_reuse_attends_everything_since_the_selection() -> None:
    config = small_config()
    layer = make_layer(config, max_batched_tokens=8)
    hidden, at = tokens(config, [50, 39])
    engine = Engine(config, draft_tokens=3)
    run_step(make_layer(config), engine, hidden, at, {0: 41, 1: 33})
    run_step(layer, engine, hidden, at, {0: 1, 1: 1})  # selects at positions 41 and 33
    frozen = layer.indexer.selection[:2].clone()
    assert frozen[:, -1].tolist() == [10, 8]
    for step in range(3):  # drafts at 42, 43, 44 and 34, 35, 36
        positions = [42 + step, 34 + step]
        x = torch.stack([hidden[r][p] for r, p in enumerate(positions)])
        p = torch.stack([at[r][:, p] for r, p in enumerate(positions)], 1)
        before = engine.snapshot()
        plan = engine.plan({0: 1, 1: 1})
        out = layer(x, p, plan=plan, caches=engine.caches, reuse=True)
        assert torch.equal(layer.indexer.selection[:2], frozen)
        assert not all(same_bits(a, b) for a, b in zip(before, engine.caches))

        fresh = Engine(config, draft_tokens=3)
        fresh.pages, fresh.slots = engine.pages, engine.slots
        state = Caches(*(t.clone() for t in before))
        prepared = ops.prepare(
            *layer.project(x), p, layer.rotary.table(), layer.norms(), state, plan
        )
        assert all(same_bits(a, b) for a, b in zip(state, engine.caches))
        for row, position in enumerate(positions):
            first = int(frozen[row, -1]) * 4
            attended = [b * 4 + i for b in frozen[row, :-1].tolist() if b >= 0 for i in range(4)]
            attended += range(first, position + 1)
            expected = attend_tokens(layer, prepared, state, plan, row, attended)
            torch.testing.assert_close(out[row], expected, rtol=1e-4, atol=1e-5)


def attend_tokens(layer, prepared, caches, plan, row: int, attended: list[int]) -> torch.Tensor:
    """Dense float64 attention of one row over named tokens, then gate and output projection."""
    token, config = torch.tensor(attended), layer.config
    assert len(set(attended)) == len(attended)
    size = caches.main.shape[2]
    page = plan.page_table[int(plan.request_ids[row])].long()[token // size]
    kv = caches.main[page, :, token % size].double()
    k, v = kv.repeat_interleave(config.group_size, 1).chunk(2, -1)
    scores = torch.einsum("hd,thd->ht", prepared.query[row].double(), k) * config.scale
    attn = torch.einsum("ht,thd->hd", scores.softmax(-1), v)
    attn = attn * torch.sigmoid(prepared.gate[row].double())
    return layer.o_proj(attn.float().flatten()[None])[0]


@pytest.mark.bug("O-19")
def test_a_layer_selects_by_its_own_index_weights() -> None:
    config = small_config()
    layer, other = (make_layer(config, max_batched_tokens=60) for _ in range(2))
    torch.nn.init.normal_(other.indexer.index_qk_proj.weight, std=0.2)
    hidden, at = tokens(config, [60])
    outs = [run_step(one, Engine(config), hidden, at, {0: 60})[0] for one in (layer, other)]
    rows, others = layer.indexer.selection, other.indexer.selection
    assert torch.equal(rows[:19], others[:19])  # all that is visible
    assert not torch.equal(rows[19:], others[19:])
    torch.testing.assert_close(outs[0][:19], outs[1][:19])
    assert not torch.allclose(outs[0][19:], outs[1][19:])


@pytest.mark.bug("O-08", "O-22", "O-24")
def test_any_split_equals_one_prefill() -> None:
    config = small_config()
    layer = make_layer(config)
    hidden, at = tokens(config, [34])
    (expected,) = run_step(layer, Engine(config), hidden, at, {0: 34})
    for cut in range(1, 34):
        engine = Engine(config)
        parts = [run_step(layer, engine, hidden, at, {0: n})[0] for n in (cut, 34 - cut)]
        torch.testing.assert_close(torch.cat(parts), expected, rtol=1e-4, atol=1e-5)
        before = engine.snapshot()
        engine.lengths[0] = 33  # the last token once more, as after a full prefix hit
        (again,) = run_step(layer, engine, hidden, at, {0: 1})
        torch.testing.assert_close(again, expected[33:], rtol=1e-4, atol=1e-5)
        for a, b in zip(before, engine.caches):
            torch.testing.assert_close(b, a, rtol=1e-5, atol=1e-6, equal_nan=True)


@pytest.mark.parity("P17", "P18", "P33")
def test_selection_rows() -> None:
    config = small_config()
    layer, hidden, at = make_layer(config), *tokens(config, [30])
    engine = Engine(config)
    with pytest.raises(RuntimeError, match="^selection: reuse needs"):
        run_step(layer, engine, hidden, at, {0: 5}, reuse=True)
    for bad in (torch.empty(5, 4, dtype=torch.int32), torch.empty(5, 5, dtype=torch.int64)):
        engine = Engine(config)
        with pytest.raises(ValueError, match="^selection: expected int32"):
            run_step(layer, engine, hidden, at, {0: 5}, selection=bad)
    buffered = make_layer(config, max_batched_tokens=4)
    with pytest.raises(ValueError, match="^selection: 5 rows exceed max_batched_tokens 4"):
        run_step(buffered, Engine(config), hidden, at, {0: 5})
    assert "indexer.selection" not in buffered.state_dict()
    assert buffered.half().indexer.selection.dtype == torch.int32
    rows = torch.arange(20, dtype=torch.int32).view(4, 5)
    buffered.indexer.selection.copy_(rows)
    buffered.indexer.compact(torch.tensor([3, 1]))
    assert torch.equal(buffered.indexer.selection[:2], rows[[3, 1]])


@pytest.mark.parity("P39")
def test_schedule_hints_change_nothing() -> None:
    config = small_config()
    layer = make_layer(config)
    hidden, at = tokens(config, [40, 40])
    outputs = []
    hints = (
        {},
        {"num_decodes": 0, "num_decode_tokens": 0, "decode_query_len": 1},
        {"max_query_len": 64, "max_seq_len": 4096},
    )
    for hint in hints:
        torch.manual_seed(0)
        engine = Engine(config)
        run_step(layer, engine, hidden, at, {0: 31, 1: 35})
        plan = dataclasses.replace(engine.plan({0: 1, 1: 1}), **hint)
        x, p = (
            torch.stack([hidden[0][31], hidden[1][35]]),
            torch.stack([at[0][:, 31], at[1][:, 35]], 1),
        )
        outputs.append(layer(x, p, plan=plan, caches=engine.caches))
    assert all(same_bits(outputs[0], other) for other in outputs[1:])


@pytest.mark.parity("P01", "P05", "P28", "P41")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("main, index", [("auto", "bf16"), ("fp8", "fp8_e4m3")])
def test_cache_dtypes(dtype: torch.dtype, main: str, index: str) -> None:
    config = small_config()
    options = {"cache_dtype": main, "index_cache_dtype": index, "dtype": dtype}
    layer = make_layer(config, **options)
    layer.k_scale.fill_(0.03)
    layer.v_scale.fill_(0.02)
    expected_dtype = E4M3 if main == "fp8" else dtype
    assert layer.cache_dtype == layer.indexer.cache_dtype == expected_dtype
    hidden, at = tokens(config, [18])  # everything is selected, so rounding cannot change the set
    hidden = [hidden[0].to(dtype)]
    engine = Engine(
        config, dtype=dtype, main_dtype=layer.cache_dtype, index_dtype=layer.indexer.cache_dtype
    )
    got = [run_step(layer, engine, hidden, at, rows)[0] for rows in ({0: 13}, {0: 4}, {0: 1})]
    wide = make_layer(config)
    wide.load_state_dict({k: v.float() for k, v in layer.state_dict().items()})
    (truth,) = whole(wide, [hidden[0].float()], at)
    unit = 2.0**-4 if main == "fp8" else torch.finfo(dtype).eps
    error = (torch.cat(got).float() - truth).abs().max()
    assert error <= 8 * unit * truth.abs().max()


def test_scales_survive_a_change_of_dtype() -> None:
    layer = make_layer(cache_dtype="fp8")
    layer.k_scale.fill_(0.3)
    layer.to(torch.bfloat16)
    assert layer.k_scale.dtype == torch.float32 and layer.k_scale.item() == pytest.approx(0.3, 1e-7)
    assert layer.rotary.cos_sin.dtype == torch.bfloat16
    layer.float()
    table = make_layer().rotary.cos_sin
    assert torch.equal(layer.rotary.cos_sin, table)  # built again, not cast back
    assert "k_scale" not in layer.state_dict() and "k_scale" in dict(layer.named_buffers())


@pytest.mark.parametrize("packed", [False, True])
def test_a_layer_from_the_meta_device(packed: bool) -> None:
    options = {"max_batched_tokens": 3, "pack_projections": packed}
    made = make_layer(**options)
    shell = QSAAttention(small_config(), device="meta", **options).requires_grad_(False)
    assert all(t.is_meta for t in shell.state_dict().values())
    shell.to_empty(device="cpu").load_state_dict(made.state_dict())
    assert shell.k_scale.item() == shell.v_scale.item() == 1
    assert torch.equal(shell.rotary.cos_sin, made.rotary.cos_sin)
    assert torch.equal(shell.indexer.selection, made.indexer.selection)
    x, start = torch.randn(9, 48), torch.tensor([0, 9], dtype=torch.int32)
    assert torch.equal(shell(x, query_start=start), made(x, query_start=start))


@pytest.mark.parity("P05", "P23", "P28")
def test_cache_dtype_names() -> None:
    assert index_cache_dtype("bf16", torch.bfloat16) == torch.bfloat16
    assert index_cache_dtype("bf16", torch.float16) == torch.float16
    assert index_cache_dtype("fp8_e4m3", torch.float32) == E4M3
    for name in ("fp8_e5m2", "int8", "auto"):
        with pytest.raises(NotImplementedError, match=f"'bf16' or 'fp8_e4m3', got '{name}'"):
            make_layer(index_cache_dtype=name)
    with pytest.raises(
        NotImplementedError, match="^cache_dtype: expected one of auto, .*'fp8_e5m2'"
    ):
        make_layer(cache_dtype="fp8_e5m2")
    with pytest.raises(NotImplementedError, match="'bfloat16' in a float16 model"):
        main_cache_dtype("bfloat16", torch.float16)
    with pytest.raises(NotImplementedError, match="^dtype: float64 is not supported"):
        make_layer(dtype=torch.float64)
    by_prefix = {"model.layers.3": "fp8", "model.layers.3.self_attn": "auto", "model": "fp8_e4m3"}
    assert layer_cache_dtype("model.layers.3.self_attn", "bfloat16", by_prefix) == "auto"
    assert layer_cache_dtype("model.layers.33.self_attn", "auto", by_prefix) == "fp8_e4m3"
    assert layer_cache_dtype("other", "bfloat16", by_prefix) == "bfloat16"
    layers = [
        make_layer(prefix=f"layers.{i}", cache_dtype_by_prefix={"layers.1": "fp8"}) for i in (0, 1)
    ]
    assert [layer.cache_dtype for layer in layers] == [torch.float32, E4M3]


@pytest.mark.parity("P25", "P37", "P43")
def test_refusals() -> None:
    layer, engine = make_layer(), Engine(small_config())
    assert layer.config.scale == 16**-0.5
    plan, x, p = engine.plan({0: 3}), torch.randn(3, 48), torch.arange(3)
    with pytest.raises(RuntimeError, match="^caches: the layer's main cache is not bound"):
        layer(x, p, plan=plan)
    with pytest.raises(ValueError, match="^positions:"):
        layer(x, plan=plan, caches=engine.caches)
    with pytest.raises(ValueError, match="^hidden_states: 2 rows, the plan has 3"):
        layer(x[:2], p, plan=plan, caches=engine.caches)
    with pytest.raises(ValueError, match="^hidden_states: needed"):
        layer(None, p, plan=plan, caches=engine.caches)
    with pytest.raises(ValueError, match="^query_start:"):
        layer(x, p, plan=plan, query_start=plan.query_start)
    with pytest.raises(ValueError, match="^plan: compress_ratio 2, the layer has 4"):
        layer(x, p, plan=dataclasses.replace(plan, compress_ratio=2), caches=engine.caches)
    layer.requires_grad_(True)
    with pytest.raises(
        RuntimeError, match="^plan: a step that writes caches is not differentiable"
    ):
        layer(x, p, plan=plan, caches=engine.caches)
    for feature in ("alibi_slopes", "sinks", "sliding_window", "output_scale"):
        with pytest.raises(NotImplementedError, match=f"^{feature}: QSA has none, got 128"):
            make_layer(**{feature: 128})


@pytest.mark.parity("P38")
def test_compiles_to_one_graph() -> None:
    config = small_config()
    layer = make_layer(config, max_batched_tokens=64, pack_projections=True)
    hidden, at = tokens(config, [40, 40])
    graphs = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    outputs, states, rows = [], [], []
    for run in (layer, torch.compile(layer, fullgraph=True, backend=graphs)):
        torch.manual_seed(0)
        engine = Engine(config)
        outs = []
        for step in ({0: 31, 1: 10}, {0: 1, 1: 1}, {0: 1, 1: 1}):
            before = list(engine.lengths)
            x = torch.cat([hidden[r][before[r] : before[r] + n] for r, n in step.items()])
            p = torch.cat([at[r][:, before[r] : before[r] + n] for r, n in step.items()], 1)
            outs.append(run(x, p, plan=engine.plan(step), caches=engine.caches))
        outputs.append(torch.cat(outs))
        states.append(engine.caches)
        rows.append(layer.indexer.selection.clone())
    assert same_bits(*outputs) and same_bits(*rows)
    assert all(same_bits(a, b) for a, b in zip(*states))
    assert graphs.frame_count <= 3
