"""Rotary embedding.

Claims:
* positions of every accepted rank become [T, 1, 3]; others are refused;
* the table is cos and sin of position · theta^(-2i/dim), rounded once; YaRN blends as its paper
  says and carries its magnitude, for index and main heads alike;
* mRoPE takes each channel's position from its axis, interleaved or in runs;
* only the leading rotary dims turn, in NeoX or neighbour pairs; lengths are kept and scores depend
  on distance alone;
* a position past the table is refused, at the lookup and before a step.
"""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flash_qsa.config import RopeConfig
from flash_qsa.ops.rotary import RopeTable, canonical_positions, inverse_frequencies, rotate

PLAIN = RopeConfig(theta=1e4, rotary_dim=8, max_positions=4096)
MROPE = dataclasses.replace(PLAIN, rotary_dim=16, mrope_section=(3, 3, 2))


@pytest.mark.parity("P11")
def test_every_accepted_rank_has_one_canonical_form() -> None:
    one = torch.tensor([5, 6, 9], dtype=torch.int32)
    three = torch.tensor([[5, 6, 9], [1, 2, 3], [0, 0, 7]])
    want = three.t()[:, None]
    for text in (one, one[None], one.long()):
        got = canonical_positions(text)
        assert got.dtype == torch.int64 and got.shape == (3, 1, 3)
        assert torch.equal(got, one.long()[:, None, None].expand(3, 1, 3))
    assert torch.equal(canonical_positions(three), want)
    assert torch.equal(canonical_positions(want), want)
    # [1, 3] is three text tokens, not the three axes of one
    assert torch.equal(canonical_positions(one[None])[:, 0, 2], one.long())


@pytest.mark.parity("P11")
@pytest.mark.parametrize("shape", [(), (2, 5), (4, 5), (5, 1, 2), (3, 5, 1), (1, 3, 5, 1)])
def test_other_ranks_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="positions: expected shape"):
        canonical_positions(torch.zeros(shape, dtype=torch.int64))


@pytest.mark.parity("P28", "P49")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_table_is_cosine_and_sine_rounded_once(dtype: torch.dtype) -> None:
    table = RopeTable.from_config(PLAIN, dtype)
    position = torch.tensor([0, 1, 17, 4095])
    for channel in range(4):
        # the angle is an FP32 product, as in the models that ship these tables
        angle = position.float() * (1.0 / (1e4 ** torch.tensor(2 * channel / 8)))
        cos, sin = table.cos_sin[position, channel], table.cos_sin[position, 4 + channel]
        assert torch.allclose(cos.double(), angle.cos().to(dtype).double(), atol=1e-6)
        assert torch.allclose(sin.double(), angle.sin().to(dtype).double(), atol=1e-6)


@pytest.mark.bug("O-48")
def test_yarn_blends_frequencies_and_scales_the_magnitude() -> None:
    yarn = RopeConfig(
        theta=1e7,
        rotary_dim=16,
        max_positions=1_000_001,
        rope_type="yarn",
        factor=4.0,
        original_max_positions=262_144,
    )
    inverse, magnitude = inverse_frequencies(yarn)
    assert magnitude == pytest.approx(0.1 * math.log(4) + 1)
    plain = [1e7 ** (-2 * i / 16) for i in range(8)]

    def channel(turns: float) -> float:
        return 16 * math.log(262_144 / (turns * 2 * math.pi)) / (2 * math.log(1e7))

    low, high = math.floor(channel(32)), math.ceil(channel(1))
    for i in range(8):
        ramp = min(max((i - low) / (high - low), 0), 1)
        assert float(inverse[i]) == pytest.approx(plain[i] * ((1 - ramp) + ramp / 4), rel=1e-5)
    assert float(inverse[0]) == pytest.approx(plain[0])  # fast channels are kept
    assert float(inverse[7]) == pytest.approx(plain[7] / 4, rel=1e-5)  # slow ones interpolate

    # far positions: query heads of any width turn by the same rows, magnitude included
    table = RopeTable.from_config(yarn, torch.float32)
    far = torch.tensor([300_000, 1_000_000])
    for dim in (16, 24, 64):
        x = torch.randn(2, 3, dim)
        got = table.apply(x, far)
        angle = far[:, None].float() * inverse
        cos, sin = (f(angle)[:, None] * magnitude for f in (torch.cos, torch.sin))
        first, second = x[..., :8], x[..., 8:16]
        want = torch.cat((first * cos - second * sin, second * cos + first * sin), -1)
        assert torch.allclose(got[..., :16], want, atol=1e-5)
        assert torch.equal(got[..., 16:], x[..., 16:])


@pytest.mark.parity("P28", "P49")
def test_mrope_takes_each_channel_from_its_axis() -> None:
    position = torch.tensor([[3], [50], [700]])
    for interleaved, axes in ((True, "THWTHWTH"), (False, "TTTHHHWW")):
        config = dataclasses.replace(MROPE, mrope_interleaved=interleaved)
        table = RopeTable.from_config(config, torch.float32)
        cos, sin = table.rows(position)
        for channel, axis in enumerate(axes):
            row = int(position["THW".index(axis), 0])
            assert cos[0, channel] == table.cos_sin[row, channel], (interleaved, channel)
            assert sin[0, channel] == table.cos_sin[row, 8 + channel]


@pytest.mark.parity("P28")
def test_the_models_own_sections() -> None:
    config = RopeConfig(rotary_dim=64, max_positions=16, mrope_section=(11, 11, 10))
    axis = RopeTable.from_config(config, torch.float32).axis_of_channel().tolist()
    assert axis == [0, 1, 2] * 10 + [0, 1]
    assert [axis.count(which) for which in range(3)] == [11, 11, 10]


@pytest.mark.parity("P12", "P49")
def test_pairs_are_half_a_rotation_apart_or_neighbours() -> None:
    cos, sin = torch.tensor([[0.0, 1.0]]), torch.tensor([[1.0, 0.0]])
    x = torch.tensor([[1.0, 2.0, 3.0, 4.0, 9.0]])
    # the first frequency turns by a right angle, the second not at all
    assert rotate(x, cos, sin, True).tolist() == [[-3.0, 2.0, 1.0, 4.0, 9.0]]
    assert rotate(x, cos, sin, False).tolist() == [[-2.0, 1.0, 3.0, 4.0, 9.0]]


@pytest.mark.bug("O-11")
@settings(max_examples=25, deadline=None)
@given(st.integers(0, 3000), st.integers(0, 1000), st.booleans())
def test_length_is_kept_and_scores_depend_on_distance(
    start: int, distance: int, neox: bool
) -> None:
    config = dataclasses.replace(PLAIN, neox_style=neox)
    table = RopeTable.from_config(config, torch.float32)
    generator = torch.Generator().manual_seed(start * 7919 + distance)
    q, k = (torch.randn(1, 12, generator=generator) for _ in range(2))

    def score(at: int) -> float:
        turned = [table.apply(x, torch.tensor([p])) for x, p in ((q, at + distance), (k, at))]
        assert torch.allclose(turned[0].norm(), q.norm(), rtol=1e-5)
        return float((turned[0] * turned[1]).sum())

    assert score(start) == pytest.approx(score(0), abs=2e-2)


@pytest.mark.bug("O-48")
def test_positions_past_the_table_are_refused() -> None:
    table = RopeTable.from_config(PLAIN, torch.float32)
    x = torch.randn(1, 8)
    table.apply(x, torch.tensor([4092]))
    table.apply(x, torch.tensor([4095]))
    for position in (4096, 1 << 40, -1):
        with pytest.raises(IndexError, match=f"positions: {position} is outside"):
            table.apply(x, torch.tensor([position]))
    table.require(4096)
    with pytest.raises(ValueError, match="a sequence of 4097 tokens needs a rotary table"):
        table.require(4097)
