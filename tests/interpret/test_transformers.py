"""The transformers integration on Triton kernels in the interpreter.

Claims:
- With whole batch rows as pages, of any length, the kernels give transformers' logits: left padding
  (keys behind a base), packed sequences (first blocks above zero), and a decode step that appends.
- Every op of the path runs on Triton.
"""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers.models.qwen4_exp")

import flash_qsa.hf  # noqa: E402, F401  (registers "qsa")
from flash_qsa import dispatch  # noqa: E402
from flash_qsa.testing.ties import lower_ids_first  # noqa: E402
from flash_qsa.testing.tiny_models import tiny_text_model  # noqa: E402

SHAPE = {
    "full_attention_interval": 1,
    "num_hidden_layers": 1,
    "ple_layer_ids": [],
    "head_dim": 64,
    "indexer_head_dim": 64,
    "indexer_budget": 8,
}
TRITON = {("select_blocks", "triton"), ("sparse_attention", "triton")}


def test_kernels_on_whole_rows(monkeypatch):
    stock, ours = (tiny_text_model(attn_implementation=name, **SHAPE) for name in ("sdpa", "qsa"))
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, 259, (2, 19), generator=generator)
    padding = (torch.arange(19) >= torch.tensor([0, 4])[:, None]).long()
    packed = torch.cat((torch.arange(5), torch.arange(14))).expand(2, -1)
    monkeypatch.setenv("FLASH_QSA_BACKEND", "triton")
    for kwargs in (
        {"attention_mask": padding, "use_cache": False},
        {"position_ids": packed, "use_cache": False},
    ):
        with torch.no_grad(), lower_ids_first():
            expected = stock(ids, **kwargs).logits
            with dispatch.trace() as ran:
                got = ours(ids, **kwargs).logits
        assert set(ran) == TRITON
        torch.testing.assert_close(got, expected, atol=1e-5, rtol=0)
    how = {"attention_mask": padding, "max_new_tokens": 2, "do_sample": False}
    with lower_ids_first():
        assert torch.equal(ours.generate(ids, **how), stock.generate(ids, **how))
