"""With transformers as the oracle, "qsa" changes nothing but the time.

Claims, for the whole architecture in FP32:
- Logits agree within 1e-5 for every kind of mask: none, padding left and right, holes, padding
  rows without a single visible key, packed sequences with restarting positions, and masks of the
  user's own.
- They agree at every prompt length around the edge where attention turns sparse.
- Generated tokens are the same: greedy, beams, chunked prefill, static cache, padded batches.
- A cache that is cropped and continued gives the logits of a cold run.
- The hidden rows of padding stay finite.
"""

from __future__ import annotations

import inspect

import pytest
import torch

from flash_qsa.testing.tiny_models import tiny_text_model

TOLERANCE = 1e-5


def left_padded(lengths, width):
    lengths = torch.tensor(lengths)
    return (torch.arange(width) >= width - lengths[:, None]).long()


@pytest.mark.parametrize("length", [1, 4, 19, 20, 21, 24])
def test_around_the_budget_edge(stock, ours, logits, length):
    """16 tokens of budget and up to 3 open ones: 19 is dense, 20 the first sparse length."""
    ids = torch.randint(3, 259, (1, length))
    torch.testing.assert_close(
        logits(ours, ids, use_cache=False),
        logits(stock, ids, use_cache=False),
        atol=TOLERANCE,
        rtol=0,
    )


@pytest.mark.parametrize(
    "mask",
    [
        pytest.param(left_padded([33, 2], 46), id="left"),
        pytest.param(left_padded([46, 33], 46).flip(1), id="right"),
        pytest.param(
            (torch.rand(2, 46, generator=torch.Generator().manual_seed(1)) < 0.7).long(), id="holes"
        ),
    ],
)
def test_padding(stock, ours, logits, prompt, mask):
    position_ids = (mask.cumsum(1) - 1).clamp(min=0)
    for kwargs in ({"use_cache": False}, {"position_ids": position_ids}):
        expected = logits(stock, prompt, attention_mask=mask, **kwargs)
        got = logits(ours, prompt, attention_mask=mask, **kwargs)
        assert got.isfinite().all()
        torch.testing.assert_close(got, expected, atol=TOLERANCE, rtol=0)


def test_batch_of_two_short_rows_equals_solo_runs(ours, logits):
    """Lengths 5 and 9: a padding row without any visible key must not spread NaN."""
    short, long = torch.randint(3, 259, (1, 5)), torch.randint(3, 259, (1, 9))
    both = torch.cat((torch.nn.functional.pad(short, (4, 0)), long))
    mask = left_padded([5, 9], 9)
    together = logits(ours, both, attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp(0))
    assert together.isfinite().all()
    torch.testing.assert_close(together[:1, 4:], logits(ours, short), atol=TOLERANCE, rtol=0)
    torch.testing.assert_close(together[1:], logits(ours, long), atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("starts", [(24, 28), (3, 6, 9, 12, 40)])
def test_packed_sequences(stock, ours, logits, prompt, starts):
    bounds = [0, *starts, 46]
    packed = torch.cat([torch.arange(b - a) for a, b in zip(bounds, bounds[1:])])
    other = torch.cat((torch.arange(21), torch.arange(25)))
    position_ids = torch.stack((packed, other))
    torch.testing.assert_close(
        logits(ours, prompt, position_ids=position_ids, use_cache=False),
        logits(stock, prompt, position_ids=position_ids, use_cache=False),
        atol=TOLERANCE,
        rtol=0,
    )


def test_packed_sequences_equal_separate_ones(qsa_layers_only, logits):
    _, ours = qsa_layers_only
    first, second = torch.randint(3, 259, (1, 37)), torch.randint(3, 259, (1, 50))
    position_ids = torch.cat((torch.arange(37), torch.arange(50)))[None]
    packed = logits(ours, torch.cat((first, second), 1), position_ids=position_ids, use_cache=False)
    torch.testing.assert_close(packed[:, :37], logits(ours, first), atol=TOLERANCE, rtol=0)
    torch.testing.assert_close(packed[:, 37:], logits(ours, second), atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("kind", ["bool", "additive"])
def test_mask_of_the_users_own(stock, ours, logits, prompt, kind):
    """A window of 20 tokens is no mask that QSA knows: transformers' own layer runs."""
    token = torch.arange(46)
    mask = (token <= token[:, None]) & (token > token[:, None] - 20)
    mask = mask.expand(2, 1, 46, 46)
    if kind == "additive":
        mask = torch.zeros(()).where(mask, torch.finfo(torch.float32).min)
    masks = dict.fromkeys(("indexed_attention", "qwen_sparse_attention"), mask)
    masks["linear_attention"] = None
    torch.testing.assert_close(
        logits(ours, prompt, attention_mask=masks, use_cache=False),
        logits(stock, prompt, attention_mask=masks, use_cache=False),
        atol=TOLERANCE,
        rtol=0,
    )


@pytest.mark.parametrize(
    "how",
    [
        pytest.param({"num_beams": 2}, id="beams"),
        pytest.param({"prefill_chunk_size": 16}, id="chunked"),
        pytest.param({"cache_implementation": "static", "disable_compile": True}, id="static"),
    ],
)
def test_generated_tokens(stock, ours, prompt, how):
    """Left padding in one row and, for the chunks, a boundary inside a group."""
    mask = left_padded([46, 33], 46)
    how = {"max_new_tokens": 4, "do_sample": False, "attention_mask": mask, **how}
    expected = stock.generate(prompt, **how)
    assert torch.equal(ours.generate(prompt, **how), expected)


def test_generation_crosses_the_budget_edge(stock, ours):
    ids = torch.randint(3, 259, (2, 16))
    how = {"max_new_tokens": 9, "do_sample": False}
    assert torch.equal(ours.generate(ids, **how), stock.generate(ids, **how))


@pytest.mark.bug("O-24")
@pytest.mark.parametrize("length", [65, 66, 67, 68])
def test_one_token_behind_a_cached_prefix(qsa_layers_only, length):
    stock, ours = qsa_layers_only
    ids = torch.randint(3, 259, (1, length))
    with torch.no_grad():
        cold = stock(ids, use_cache=False).logits[:, -1]
        warm = ours(ids[:, :-1], use_cache=True)
        cache = _cache_of(warm)
        step = ours(ids[:, -1:], **_cache_argument(ours, cache))
        torch.testing.assert_close(step.logits[:, -1], cold, atol=TOLERANCE, rtol=0)
        # A full hit recomputes its last token; doing it twice changes nothing.
        for _ in range(2):
            cache.crop(-1)
            again = ours(ids[:, -1:], **_cache_argument(ours, cache))
            torch.testing.assert_close(again.logits, step.logits, atol=TOLERANCE, rtol=0)


@pytest.mark.bug("O-32")
def test_rows_of_very_different_length(qsa_layers_only):
    """Query lengths 1, 2 and 3 in batches of as many rows: no axis stands in for another."""
    ours = tiny_text_model(
        attn_implementation="qsa",
        full_attention_interval=1,
        num_hidden_layers=1,
        ple_layer_ids=[],
    )
    lengths, width = [55, 2300, 70], 2300
    ids = torch.randint(3, 259, (3, width + 3))
    mask = left_padded(lengths, width)

    def run(rows, queries):
        chosen, row_mask = ids[rows], mask[rows]
        row_mask = torch.nn.functional.pad(row_mask, (0, queries), value=1)
        positions = (row_mask.cumsum(1) - 1).clamp(min=0)
        with torch.no_grad():
            prefill = ours.model(
                chosen[:, :width],
                attention_mask=row_mask[:, :width],
                position_ids=positions[:, :width],
                use_cache=True,
            )
            return ours.model(
                chosen[:, width : width + queries],
                attention_mask=row_mask,
                position_ids=positions[:, width:],
                **_cache_argument(ours, _cache_of(prefill)),
            ).last_hidden_state

    solo = torch.cat([_solo(ours, ids[b], lengths[b], 3) for b in range(3)])
    close = {"atol": TOLERANCE, "rtol": 0}
    torch.testing.assert_close(run([0, 1], 1), solo[:2, :1], **close)
    torch.testing.assert_close(run([1, 0], 2), solo[[1, 0], :2], **close)
    torch.testing.assert_close(run([0, 1, 2], 3), solo, **close)


@torch.no_grad()
def _solo(model, row, length, steps):
    """Hidden states of the last `steps` tokens of one row without any padding or cache."""
    tokens = row[2300 - length : 2300 + steps][None]
    return model.model(tokens, use_cache=False).last_hidden_state[:, -steps:]


def _cache_of(output):
    return output.cache if "cache" in output else output.past_key_values


def _cache_argument(model, cache):
    """The cache under the name that this version of transformers gives it."""
    names = inspect.signature(type(model).forward).parameters
    return {"cache" if "cache" in names else "past_key_values": cache}
