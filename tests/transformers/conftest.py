"""Models that the transformers tests share, and the one freedom of transformers' own selection."""

from __future__ import annotations

import pytest
import torch

transformers = pytest.importorskip("transformers", minversion="5.16")
pytest.importorskip("transformers.models.qwen4_exp")

import flash_qsa.hf  # noqa: E402, F401  (registers "qsa")
from flash_qsa.testing.ties import lower_ids_first  # noqa: E402
from flash_qsa.testing.tiny_models import tiny_text_model  # noqa: E402


@pytest.fixture(autouse=True)
def lower_id_ties():
    """Equality with transformers is only defined with a rule for ties; this gives it ours."""
    with lower_ids_first():
        yield


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
