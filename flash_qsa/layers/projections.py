"""One product for Q with its gates, K, V and the index heads, under the checkpoint's names.

A packed layer holds one weight, `qkv_proj.weight`; its state dict still reads and writes the four
weights of a checkpoint.
"""

from __future__ import annotations

import torch
from torch import nn

from flash_qsa.layers.sharding import SHARD_WEIGHTS

PACKED = "qkv_proj.weight"


def keep_checkpoint_names(module: nn.Module, sizes: tuple[int, ...]) -> None:
    """Makes the state dict of `module` speak of four weights of `sizes` rows instead of one."""
    module.register_state_dict_post_hook(_Split(sizes))
    module.register_load_state_dict_pre_hook(_Join(sizes))


class _Split:
    def __init__(self, sizes: tuple[int, ...]) -> None:
        self.sizes = sizes

    def __call__(self, module, state_dict, prefix, local_metadata) -> None:
        packed = state_dict.pop(prefix + PACKED)
        for name, part in zip(SHARD_WEIGHTS, packed.split(self.sizes)):
            state_dict[prefix + name] = part


class _Join:
    def __init__(self, sizes: tuple[int, ...]) -> None:
        self.sizes = sizes

    def __call__(
        self, module, state_dict, prefix, local_metadata, strict, missing, unexpected, errors
    ) -> None:
        names = [prefix + name for name in SHARD_WEIGHTS]
        absent = [name for name in names if name not in state_dict]
        if len(absent) == len(names):
            return
        if absent:
            errors.append(f"{prefix}{PACKED} needs all of its four weights, without {absent}")
            return
        parts = [state_dict.pop(name) for name in names]
        for name, part, size in zip(names, parts, self.sizes):
            if part.shape[0] != size:
                errors.append(f"{name}: expected {size} rows, got {part.shape[0]}")
                return
        state_dict[prefix + PACKED] = torch.cat(parts)
