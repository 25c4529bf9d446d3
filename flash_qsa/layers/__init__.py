"""Modules: the indexer and the attention layer, and the arithmetic of sharding their weights."""

from flash_qsa.layers.attention import QSAAttention
from flash_qsa.layers.indexer import QSAIndexer
from flash_qsa.layers.norm import ZeroCentredRMSNorm
from flash_qsa.layers.preparation import prepare_unfused
from flash_qsa.layers.rotary import QSARotary
from flash_qsa.layers.sharding import shard_state_dict, share_heads

__all__ = [
    "QSAAttention",
    "QSAIndexer",
    "QSARotary",
    "ZeroCentredRMSNorm",
    "prepare_unfused",
    "shard_state_dict",
    "share_heads",
]
