"""Whose rows of a projection a tensor-parallel rank holds: arithmetic without tensors."""

from __future__ import annotations

from dataclasses import dataclass

SHARD_OF_NAME = {"q": 0, "k": 1, "v": 2}
"""Shards of the packed projection in their order, under the names that checkpoints use."""

INDEX_SHARD = 3


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
    """Divides heads over ranks; KV heads repeat when there are fewer than ranks.

    Raises:
        ValueError: numbers that do not divide, each named.
    """
    if heads % ranks:
        raise ValueError(f"num_attention_heads: {heads} heads do not divide by {ranks} ranks")
    if kv_heads >= ranks:
        if kv_heads % ranks:
            raise ValueError(
                f"num_key_value_heads: {kv_heads} heads do not divide by {ranks} ranks"
            )
        return HeadShare(heads // ranks, kv_heads // ranks, 1)
    if ranks % kv_heads:
        raise ValueError(
            f"num_key_value_heads: {ranks} ranks do not divide by {kv_heads} heads that repeat"
        )
    return HeadShare(heads // ranks, 1, ranks // kv_heads)


def shard_rank(shard: int | tuple[int, ...] | None, rank: int, kv_replicas: int) -> int:
    """The slice of shard `shard` that `rank` holds: Q its own, K and V its group's, index whole."""
    if shard == INDEX_SHARD:
        return 0
    if shard in (1, 2):
        return rank // kv_replicas
    return rank
