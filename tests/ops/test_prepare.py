"""prepare: everything between the projections and selection.

Claims:
* queries, gates, index queries, keys, values, ring rows and compressed keys are those of the
  float64 oracle within a derived bound, for mixed batches, padding, every position form, mRoPE
  orders, rotary styles, ratios, head sizes and dtypes;
* just the named cells of the three caches are written: cells of other tokens, spare pages and
  slots, and everything between a view's elements keep their bits;
* the separate ops, called one by one, give the same bits;
* FP8 caches hold to_storage of what a float cache holds, scales included; typed and bytes alike;
* a group stands at its first token's position, from the step or from the ring;
* everything that does not fit is refused by name.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch

from flash_qsa.checks import UnsupportedError
from flash_qsa.config import RopeConfig
from flash_qsa.ops import compress_keys, prepare, store_rows
from flash_qsa.ops.compress_keys.ring_rows import pack_rows
from flash_qsa.ops.fp8 import as_bytes, from_storage, to_storage
from flash_qsa.ops.norm import rms_norm
from flash_qsa.ops.prepare.api import Prepared
from flash_qsa.ops.prepare.reference import store_keys_values
from flash_qsa.ops.rotary import canonical_positions
from flash_qsa.testing.compare import assert_within
from flash_qsa.testing.inputs import Shape
from flash_qsa.testing.prepared import assert_prepared, bits, heads_truth, split
from flash_qsa.testing.steps import make_step

SEQ_LENS, QUERY_LENS = [9, 7, 30, 4, 12], [1, 2, 17, 4, 12]
MROPE = RopeConfig(rotary_dim=8, max_positions=64, mrope_section=(2, 1, 1))
CASES = {
    "text": {},
    "text-1xT-ring-positions": {"position_form": "1xT", "ring_positions": True},
    "padded": {"padding": 3},
    "mrope-interleaved": {"position_form": "3d", "ring_positions": True, "rope": MROPE},
    "mrope-runs": {
        "position_form": "canonical",
        "ring_positions": True,
        "rope": dataclasses.replace(MROPE, mrope_interleaved=False),
    },
    "neighbour-pairs": {"rope": RopeConfig(rotary_dim=16, max_positions=64, neox_style=False)},
    "ratio-3": {"shape": Shape(ratio=3, page_size=12, ring_capacity=6)},
    "ratio-1": {"shape": Shape(ratio=1, page_size=7, ring_capacity=3)},
    "odd-heads": {"shape": Shape(heads=3, kv_heads=1, head_dim=48, index_heads=3, index_dim=24)},
    "bf16": {"dtype": torch.bfloat16, "ring_positions": True},
    "fp16-large": {"dtype": torch.float16, "scale": 100.0},
}


@pytest.mark.parity("P04", "P06", "P10", "P12", "P13", "P16", "P29", "P49")
@pytest.mark.bug("O-11", "O-16", "O-36")
@pytest.mark.parametrize("case", CASES)
def test_equals_float64_and_writes_only_the_named_cells(case: str) -> None:
    options = {"backend": "reference"}
    problem = make_step(SEQ_LENS, QUERY_LENS, **CASES[case])
    caches, before = problem.clone_caches(), problem.clone_caches()
    out = problem.run(caches, **options)
    assert_prepared(problem, out, caches, before)


@pytest.mark.parity("P12", "P15", "P42")
@pytest.mark.parametrize("fp8", [False, True])
def test_the_separate_ops_give_the_same_bits(fp8: bool) -> None:
    dtypes = {"main_dtype": torch.uint8, "index_dtype": torch.uint8} if fp8 else {}
    scales = {"k_scale": 0.5, "v_scale": 3.0} if fp8 else {}
    problem = make_step(SEQ_LENS, QUERY_LENS, ring_positions=True, padding=2, **dtypes)
    fused, apart = problem.clone_caches(), problem.clone_caches()
    out = problem.run(fused, **scales)
    plan, rope, norms, shape = problem.plan, problem.rope, problem.norms, problem.shape
    real = plan.num_tokens
    parts, at = split(problem), canonical_positions(problem.positions)[:real]

    assert torch.equal(
        out.query[:real], rope.apply(rms_norm(parts["query"], norms.query, norms.eps), at)
    )
    index_query = rope.apply(rms_norm(parts["index_query"], norms.index_query, norms.eps), at)
    assert torch.equal(
        as_bytes(out.index_query[:real]), as_bytes(to_storage(index_query, out.index_query.dtype))
    )
    padded = canonical_positions(problem.positions)
    raw_keys = problem.index_qk[:, -shape.index_dim :]
    pooled, first = compress_keys(raw_keys, padded, apart.ring, plan.ring_table, plan)
    keys = rope.apply(rms_norm(pooled, norms.index_key, norms.eps), first.clamp(min=0))
    store_rows(apart.compressed, plan.compressed_slots, keys)
    store_rows(apart.ring, plan.ring_slots, pack_rows(raw_keys, padded, apart.ring.shape[3]))
    keys = rope.apply(rms_norm(parts["key"], norms.key, norms.eps), at)
    k_scale, v_scale = scales.get("k_scale"), scales.get("v_scale")
    slots = plan.main_slots[:real]
    store_keys_values(apart.main, slots, keys, parts["value"], k_scale, v_scale)
    for one, two in zip(fused, apart):
        assert torch.equal(bits(one), bits(two))


@pytest.mark.parity("P05", "P13", "P31")
@pytest.mark.bug("O-42")
def test_fp8_caches_hold_the_rounded_float_caches() -> None:
    options = {"ring_positions": True, "scale": 200.0}
    wide = make_step(SEQ_LENS, QUERY_LENS, **options)
    wide_caches = wide.clone_caches()
    wide_out = wide.run(wide_caches)
    stored = {}
    for dtype in (torch.uint8, torch.float8_e4m3fn):
        narrow = make_step(SEQ_LENS, QUERY_LENS, main_dtype=dtype, index_dtype=dtype, **options)
        caches = narrow.clone_caches()
        scales = {"k_scale": 0.5, "v_scale": torch.tensor([0.25])}
        out = narrow.run(caches, **scales)
        assert out.index_query.dtype == dtype
        want = to_storage(wide_out.index_query, dtype)
        assert torch.equal(as_bytes(out.index_query), as_bytes(want))
        assert torch.equal(
            as_bytes(caches.compressed), as_bytes(to_storage(wide_caches.compressed, dtype))
        )
        dim = wide.shape.head_dim
        for half, scale in ((slice(0, dim), 0.5), (slice(dim, None), 0.25)):
            want = to_storage(wide_caches.main[..., half], dtype, scale)
            assert torch.equal(as_bytes(caches.main[..., half]), as_bytes(want))
        values = from_storage(caches.main[..., dim:]) * 0.25
        assert values.nan_to_num(0).abs().max() == 448 * 0.25  # saturated, not NaN
        stored[dtype] = as_bytes(caches.main)
    assert torch.equal(stored[torch.uint8], stored[torch.float8_e4m3fn])


@pytest.mark.parity("P10")
def test_padding_rows_are_finite_where_their_inputs_are() -> None:
    problem = make_step([9], [3], padding=2)
    for tensor in (problem.qkv, problem.index_qk):
        tensor[3:] = 1.0
    out = problem.run(problem.clone_caches())
    assert all(part[3:].isfinite().all() for part in out)


@pytest.mark.parity("P16")
@pytest.mark.bug("O-11", "O-47")
def test_identical_keys_differ_by_their_groups_positions_alone() -> None:
    shape = Shape(index_dim=32, head_dim=32)
    rope = RopeConfig(theta=1e4, rotary_dim=16, max_positions=4096)
    problem = make_step([1004], [1004], shape, rope=rope)
    problem.index_qk[:, -shape.index_dim :] = torch.randn(shape.index_dim)
    caches = problem.clone_caches()
    problem.run(caches)
    plan = problem.plan
    keys = []
    for start in (0, 4, 1000):
        slot = int(plan.compressed_slots[start + 3])
        keys.append(caches.compressed[slot // 4, slot % 4, 0])
    for key in keys[1:]:
        assert torch.equal(key[16:], keys[0][16:])
        assert not torch.allclose(key[:16], keys[0][:16], atol=1e-2)


@pytest.mark.bug("O-48")
def test_a_group_past_the_table_is_refused() -> None:
    rope = RopeConfig(rotary_dim=8, max_positions=16)
    make_step([16], [16], rope=rope).run()
    with pytest.raises(IndexError, match="positions: 19 is outside"):
        make_step([20], [20], rope=rope).run()


@pytest.mark.bug("O-48")
@pytest.mark.parametrize("position", [300_000, 1_000_000])
def test_yarn_reaches_index_and_main_heads_at_long_positions(position: int) -> None:
    rope = RopeConfig(
        theta=1e7,
        rotary_dim=8,
        max_positions=1_000_008,
        rope_type="yarn",
        factor=4.0,
        original_max_positions=262_144,
    )
    problem = make_step([4], [4], rope=rope)
    problem = dataclasses.replace(problem, positions=problem.positions + position)
    caches = problem.clone_caches()
    out = problem.run(caches)
    at = canonical_positions(problem.positions)
    parts = split(problem)
    for name, got in (("query", out.query), ("index_query", out.index_query)):
        weight = getattr(problem.norms, name)
        truth = heads_truth(parts[name], weight, problem.norms.eps, problem.rope, at)
        assert_within(got, truth.out, truth.bound)
    magnitude = problem.rope.cos_sin[position].double().square().view(2, 4).sum(0).sqrt()
    assert torch.allclose(magnitude, torch.full((4,), 1.138629436, dtype=torch.float64), rtol=1e-6)


def test_no_rows_do_nothing() -> None:
    problem = make_step([], [])
    before = problem.clone_caches()
    out = problem.run(problem.caches)
    assert out.query.shape == (0, 4, 32) and out.index_query.shape == (0, 2, 16)
    assert all(torch.equal(bits(a), bits(b)) for a, b in zip(problem.caches, before))


def test_buffers_are_filled() -> None:
    problem = make_step(SEQ_LENS, QUERY_LENS)
    want = problem.run(problem.clone_caches())
    out = Prepared(*(torch.full_like(part, torch.nan) for part in want))
    assert problem.run(problem.clone_caches(), out=out) is out
    assert all(torch.equal(a, b) for a, b in zip(out, want))


@pytest.mark.parity("P01")
def test_refusals() -> None:
    problem = make_step([9, 4], [1, 4])
    half = problem.qkv.half()
    caches = problem.caches
    cases = [
        ({"qkv": problem.qkv[:, :-1]}, ValueError, "qkv: .* query columns"),
        ({"qkv": problem.qkv.double()}, UnsupportedError, "qkv: dtype float64"),
        ({"qkv": half}, UnsupportedError, "index_qk: dtype float32"),
        ({"index_qk": problem.index_qk[:4]}, ValueError, "index_qk: expected shape"),
        ({"index_qk": problem.index_qk[:, :16]}, ValueError, "index_qk: 0 query columns"),
        ({"positions": problem.positions[:4]}, ValueError, "positions: expected 5 rows"),
        ({"positions": problem.positions[None, None]}, ValueError, "positions: expected shape"),
        ({"caches": caches._replace(main=caches.main.half())}, UnsupportedError, "caches.main"),
        ({"caches": caches._replace(ring=caches.ring[:, :4])}, ValueError, "caches.ring: capacity"),
        ({"caches": caches._replace(ring=caches.ring[..., :15])}, ValueError, "ring: rows of 15"),
        (
            {"caches": caches._replace(compressed=caches.compressed[:, :3])},
            ValueError,
            "caches: pages of 16 tokens and 3 compressed keys",
        ),
        ({"norms": problem.norms._replace(key=problem.norms.index_key)}, ValueError, "norms.key"),
        ({"k_scale": 0.5}, ValueError, "k_scale: only an FP8 cache has scales"),
        ({"v_scale": 0.5}, ValueError, "v_scale: only an FP8 cache has scales"),
        (
            {"rope": dataclasses.replace(problem.rope, cos_sin=torch.zeros(64, 24))},
            ValueError,
            "rope: 24 rotary dims exceed a head of 16",
        ),
    ]
    base = {
        name: getattr(problem, name)
        for name in ("qkv", "index_qk", "positions", "rope", "norms", "caches", "plan")
    }
    for changes, error, message in cases:
        with pytest.raises(error, match=message):
            prepare(**{**base, **changes})
