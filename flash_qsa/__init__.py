"""flash-qsa: exact, deterministic, trainable Qwen Sparse Attention.

Importing the package needs torch alone; Triton, transformers and vLLM are imported by the parts
that use them, at the moment they are used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

__version__ = "0.1.0"

_EXPORTS = {
    "QSAConfig": "flash_qsa.config",
    "BatchPlan": "flash_qsa.plan",
    "QSACache": "flash_qsa.cache",
    "QSAIndexer": "flash_qsa.layers",
    "QSAAttention": "flash_qsa.layers",
    "dense_attention": "flash_qsa.ops.dense_attention",
}
_SUBMODULES = ("cache", "dispatch", "hf", "integrations", "layers", "ops", "testing")

__all__ = [
    "BatchPlan",
    "QSAAttention",
    "QSACache",
    "QSAConfig",
    "QSAIndexer",
    "__version__",
    "dense_attention",
]

if TYPE_CHECKING:
    from flash_qsa.cache import QSACache
    from flash_qsa.config import QSAConfig
    from flash_qsa.layers import QSAAttention, QSAIndexer
    from flash_qsa.ops.dense_attention import dense_attention
    from flash_qsa.plan import BatchPlan


def __getattr__(name: str):
    if name in _EXPORTS:
        return getattr(importlib.import_module(_EXPORTS[name]), name)
    if name in _SUBMODULES:
        return importlib.import_module(f"flash_qsa.{name}")
    raise AttributeError(f"module 'flash_qsa' has no attribute {name!r}")
