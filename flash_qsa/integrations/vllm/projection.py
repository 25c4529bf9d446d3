"""One product for Q with its gates, K, V and the index heads. Imports vLLM."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from vllm.model_executor.layers.linear import MergedColumnParallelLinear, QKVParallelLinear

from flash_qsa.layers.sharding import shard_id, shard_rank


class PackedProjection(MergedColumnParallelLinear):
    """Rows of one rank: its Q and gate heads, its K and V heads, and all index heads.

    The base class gives every output the rank's own slice. Here K and V repeat when there are
    fewer heads than ranks, and the index projection is whole on every rank, so a shard is loaded
    under the rank whose slice it is.

    Args:
        qkv: the projection that this one replaces; its sizes, rank count and prefix are taken.
        index_size: rows of the index projection.
        quant_config: of `qkv`.
    """

    def __init__(self, qkv: QKVParallelLinear, index_size: int, quant_config: Any) -> None:
        self.kv_replicas = qkv.num_kv_head_replicas
        super().__init__(
            input_size=qkv.input_size,
            output_sizes=[*qkv.output_sizes, index_size * qkv.tp_size],
            bias=False,
            params_dtype=qkv.params_dtype,
            quant_config=quant_config,
            prefix=qkv.prefix,
        )

    @contextmanager
    def _as_rank_of(self, param: nn.Parameter, shard: int) -> Iterator[None]:
        """Loads under the rank that owns a shard; both rank fields are restored, errors or not."""
        owners = [owner for owner in (self, param) if getattr(owner, "tp_rank", None) is not None]
        saved = [owner.tp_rank for owner in owners]
        rank = shard_rank(shard, self.tp_rank, self.kv_replicas)
        try:
            for owner in owners:
                owner.tp_rank = rank
            yield
        finally:
            for owner, before in zip(owners, saved):
                owner.tp_rank = before

    def _load(
        self, loader: Callable[..., None], param: nn.Parameter, weight: torch.Tensor, shard: Any
    ) -> None:
        if shard is None or isinstance(shard, tuple):
            loader(param, weight, shard)  # several shards at once: the base comes back with each
            return
        shard = shard_id(shard)
        with self._as_rank_of(param, shard):
            loader(param, weight, shard)

    def weight_loader(
        self, param: nn.Parameter, loaded_weight: torch.Tensor, loaded_shard_id: Any = None
    ) -> None:
        self._load(super().weight_loader, param, loaded_weight, loaded_shard_id)

    def weight_loader_v2(
        self, param: nn.Parameter, loaded_weight: torch.Tensor, loaded_shard_id: Any = None
    ) -> None:
        self._load(super().weight_loader_v2, param, loaded_weight, loaded_shard_id)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Iterable[str]:
        return super().load_weights(_numbered(weights))


def _numbered(
    weights: Iterable[tuple[str, torch.Tensor]],
) -> Iterator[tuple[str, torch.Tensor]]:
    """Shards that are named q, k, v (as for an unpacked projection) get their numbers."""
    for name, weight in weights:
        shard = getattr(weight, "shard_id", None)
        if isinstance(shard, str):
            weight = weight.detach()
            weight.shard_id = shard_id(shard)
        yield name, weight
