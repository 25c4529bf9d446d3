"""Adapters on the index projection act on selection.

* With a low-rank adapter on `indexer.index_qk_proj` the "qsa" path gives stock's logits under the
  same adapter, and other ones than without it.
* Turning the adapter off gives the base model's answer back, bit for bit.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

import flash_qsa.hf  # noqa: F401 - registers "qsa"
from flash_qsa.testing.tiny_models import tiny_text_model


class LowRank(nn.Module):
    """base(x) + up(down(x)), as adapter libraries wrap a projection in place."""

    def __init__(self, base: nn.Linear, rank: int = 4) -> None:
        super().__init__()
        self.base, self.on = base, True
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)

    @property
    def weight(self) -> torch.Tensor:
        return self.base.weight  # adapter libraries expose the base's weight, without the adapter

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.up(self.down(x)) if self.on else self.base(x)


@pytest.mark.bug("O-49")
@torch.inference_mode()
def test_an_adapter_on_the_index_projection_changes_selection_as_in_stock():
    model = tiny_text_model(num_hidden_layers=2)
    ids = torch.randint(3, 259, (2, 70), generator=torch.Generator().manual_seed(1))

    def logits(implementation: str) -> torch.Tensor:
        model.set_attn_implementation(implementation)
        return model(input_ids=ids).logits

    base = logits("qsa")
    indexer = next(m.indexer for m in model.modules() if hasattr(m, "indexer"))
    torch.manual_seed(3)
    adapter = LowRank(indexer.index_qk_proj)
    for matrix in (adapter.down, adapter.up):
        nn.init.normal_(matrix.weight, std=0.5)
    indexer.index_qk_proj = adapter
    adapted = logits("qsa")
    torch.testing.assert_close(adapted, logits("sdpa"), rtol=1e-5, atol=1e-5)
    assert (adapted - base).abs().max() > 1e-3
    adapter.on = False
    assert torch.equal(logits("qsa"), base)
