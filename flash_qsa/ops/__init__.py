"""Functional ops over tensors, each with a PyTorch specification and a Triton kernel.

See `DESIGN.md` for shapes and words. Every op takes `backend="auto" | "reference" | "triton"`.
"""

import flash_qsa.library  # noqa: F401  (registers torch.ops.flash_qsa)
from flash_qsa.ops.batch_plan.api import plan_rows
from flash_qsa.ops.compress_keys.api import compress_keys
from flash_qsa.ops.dense_attention import dense_attention
from flash_qsa.ops.expand_blocks.api import expand_blocks
from flash_qsa.ops.prepare.api import prepare
from flash_qsa.ops.select_blocks.api import select_blocks
from flash_qsa.ops.sparse_attention.api import sparse_attention
from flash_qsa.ops.store_rows.api import store_rows

__all__ = [
    "compress_keys",
    "dense_attention",
    "expand_blocks",
    "plan_rows",
    "prepare",
    "select_blocks",
    "sparse_attention",
    "store_rows",
]
