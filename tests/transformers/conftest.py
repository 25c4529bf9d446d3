"""Models that the transformers tests share, and the one freedom of transformers' own selection."""

from __future__ import annotations

import pytest
import torch

transformers = pytest.importorskip("transformers", minversion="5.16")
pytest.importorskip("transformers.models.qwen4_exp")

import flash_qsa.hf  # noqa: E402, F401  (registers "qsa")
from flash_qsa.testing.tiny_models import tiny_text_model  # noqa: E402


def _lower_ids_first(scores, k, dim=-1, largest=True, sorted=True):
    values, indices = scores.sort(dim=dim, descending=largest, stable=True)
    if scores.shape[dim] > k:
        gap = values.select(dim, k - 1) - values.select(dim, k)
        # Two implementations may differ by rounding; a test's input must not hang on that.
        assert not ((gap > 0) & (gap < 1e-5)).any(), "two scores nearly tie: use another seed"
    return torch.return_types.topk((values.narrow(dim, 0, k), indices.narrow(dim, 0, k)))


@pytest.fixture(autouse=True)
def lower_id_ties(monkeypatch):
    """Among equal scores transformers' indexer takes whichever `Tensor.topk` returns.

    Scores of exactly zero are ordinary behind a ReLU, so equality with transformers is only defined
    with a rule for ties; this gives it ours, the lower block first. Nothing else in its model calls
    the method form of topk, and none of our code runs inside the patch's reach: ranks are integers.
    """
    original = torch.Tensor.topk

    def topk(self, *args, **kwargs):
        if self.is_floating_point():
            return _lower_ids_first(self, *args, **kwargs)
        return original(self, *args, **kwargs)

    monkeypatch.setattr(torch.Tensor, "topk", topk)


@pytest.fixture(scope="session")
def stock():
    """The whole architecture with transformers' own attention."""
    return tiny_text_model()


@pytest.fixture(scope="session")
def ours():
    """The same weights with attention implementation "qsa"."""
    return tiny_text_model(attn_implementation="qsa")


@pytest.fixture(scope="session")
def qsa_layers_only():
    """(transformers' own, ours): two QSA layers and nothing recurrent, so caches can be cropped."""
    only = {"full_attention_interval": 1, "num_hidden_layers": 2, "ple_layer_ids": []}
    return tiny_text_model(**only), tiny_text_model(attn_implementation="qsa", **only)


@pytest.fixture
def prompt():
    """int64 [2, 46] bytes."""
    return torch.randint(3, 259, (2, 46), generator=torch.Generator().manual_seed(5))


@pytest.fixture
def logits():
    """A function: FP32 logits of a model."""

    @torch.no_grad()
    def run(model, input_ids, **kwargs):
        return model(input_ids=input_ids, **kwargs).logits

    return run
