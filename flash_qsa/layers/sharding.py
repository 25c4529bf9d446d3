"""Tensor parallelism as arithmetic: which rows of which projection a rank holds.

Query heads divide by the ranks. KV heads divide too, or repeat where there are fewer than ranks.
The index projection is whole on every rank, so that all ranks select the same blocks. The output
projection is split by its inputs and its partial sums are to be added up.

A packed projection holds a rank's rows of four shards, in the order of `SHARDS`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from flash_qsa.config import QSAConfig

SHARDS = ("q", "k", "v", "index")
"""Names of a packed projection's parts; their ids are 0 to 3. "q" holds each head's gate too."""

INDEX_SHARD = 3

SHARD_WEIGHTS = (
    "q_proj.weight",
    "k_proj.weight",
    "v_proj.weight",
    "indexer.index_qk_proj.weight",
)
"""The checkpoint's name of each shard, below the layer's prefix."""


@dataclass(frozen=True)
class HeadShare:
    """One rank's heads.

    Attributes:
        heads, kv_heads: local query and KV heads.
        kv_replicas: ranks that hold the same KV head; 1 where heads are divided.
    """

    heads: int
    kv_heads: int
    kv_replicas: int


def share_heads(heads: int, kv_heads: int, ranks: int) -> HeadShare:
    """Divides heads over ranks.

    Raises:
        ValueError: numbers that do not divide, each named.
    """
    if ranks < 1:
        raise ValueError(f"ranks: expected at least 1, got {ranks}")
    if heads % ranks:
        raise ValueError(f"num_heads: {heads} query heads do not divide by {ranks} ranks")
    if kv_heads >= ranks:
        if kv_heads % ranks:
            raise ValueError(f"num_kv_heads: {kv_heads} KV heads do not divide by {ranks} ranks")
        return HeadShare(heads // ranks, kv_heads // ranks, 1)
    if ranks % kv_heads:
        raise ValueError(
            f"num_kv_heads: {kv_heads} KV heads cannot be repeated evenly over {ranks} ranks"
        )
    return HeadShare(heads // ranks, 1, ranks // kv_heads)


def shard_id(shard: int | str) -> int:
    """0 to 3, for an id or a name of `SHARDS`."""
    if shard in SHARDS:
        return SHARDS.index(shard)
    if isinstance(shard, int) and 0 <= shard < len(SHARDS):
        return shard
    raise ValueError(f"shard: expected 0 to 3 or one of {', '.join(SHARDS)}, got {shard!r}")


def shard_rank(shard: int | str, rank: int, kv_replicas: int) -> int:
    """The slice of a shard that `rank` holds: Q its own, K and V its group's, the index all."""
    return (rank, rank // kv_replicas, rank // kv_replicas, 0)[shard_id(shard)]


def shard_sizes(config: QSAConfig, ranks: int = 1) -> tuple[int, int, int, int]:
    """Rows of the four shards on one rank."""
    share = share_heads(config.num_heads, config.num_kv_heads, ranks)
    kv_rows = share.kv_heads * config.head_dim
    index_rows = (config.index_heads + config.index_kv_heads) * config.index_head_dim
    return share.heads * 2 * config.head_dim, kv_rows, kv_rows, index_rows


def packed_slice(config: QSAConfig, shard: int | str, ranks: int = 1) -> slice:
    """Rows of a shard inside a rank's packed projection."""
    sizes, which = shard_sizes(config, ranks), shard_id(shard)
    start = sum(sizes[:which])
    return slice(start, start + sizes[which])


def checkpoint_slice(config: QSAConfig, shard: int | str, rank: int, ranks: int) -> slice:
    """Rows of the checkpoint's projection that `rank` holds.

    Raises:
        ValueError: heads that do not divide, or a rank outside 0 … ranks - 1.
    """
    share = share_heads(config.num_heads, config.num_kv_heads, ranks)
    _require_rank(rank, ranks)
    size = shard_sizes(config, ranks)[shard_id(shard)]
    start = shard_rank(shard, rank, share.kv_replicas) * size
    return slice(start, start + size)


def output_slice(config: QSAConfig, rank: int, ranks: int) -> slice:
    """Columns of the checkpoint's output projection that `rank` holds."""
    share = share_heads(config.num_heads, config.num_kv_heads, ranks)
    _require_rank(rank, ranks)
    size = share.heads * config.head_dim
    return slice(rank * size, (rank + 1) * size)


def shard_state_dict(
    state: Mapping[str, torch.Tensor], config: QSAConfig, rank: int, ranks: int, prefix: str = ""
) -> dict[str, torch.Tensor]:
    """One rank's part of a layer's checkpoint tensors, as views.

    Args:
        state: full tensors under `prefix`; names that are none of the layer's projections are
            passed on whole.
    """
    rows = {
        prefix + name: checkpoint_slice(config, shard, rank, ranks)
        for shard, name in enumerate(SHARD_WEIGHTS)
    }
    local = {name: t[rows[name]] if name in rows else t for name, t in state.items()}
    output = prefix + "o_proj.weight"
    if output in local:
        local[output] = local[output][:, output_slice(config, rank, ranks)]
    return local


def _require_rank(rank: int, ranks: int) -> None:
    if not 0 <= rank < ranks:
        raise ValueError(f"rank: expected 0 to {ranks - 1}, got {rank}")
