"""Sequences that are one page each, as tensors of whole sequences are, may have any length.

Claim: generating token by token, and prompts of every length, are served by a few binaries,
although the page grows with the sequence: no length is a constant of a kernel.
"""

from __future__ import annotations

import pytest
import torch

from flash_qsa import ops
from flash_qsa.launches import record
from flash_qsa.targets import TARGETS

CAPACITY = 5000
RATIO, DIM, TOP_K = 4, 256, 64


def step(rows: int, length: int, spare: bool) -> None:
    """Selection and attention of one request's last rows; `spare`: its tensors are the beginnings
    of larger ones, as those of a cache that grows in place."""

    def empty(*shape, dtype=torch.bfloat16):
        return torch.empty(shape, dtype=dtype, device="meta")

    index = {"dtype": torch.int32}
    tokens = CAPACITY if spare else length
    keys, values = (empty(1, 2, tokens, DIM)[:, :, :length] for _ in range(2))
    pooled = empty(1, tokens // RATIO, 1, 128)[:, : length // RATIO]
    table, requests = empty(1, 1, **index), empty(rows, **index)
    ids = ops.select_blocks(
        empty(rows, 4, 128), pooled, table, requests, empty(rows, **index), TOP_K, backend="triton"
    )
    ops.sparse_attention(
        empty(rows, 12, DIM),
        (keys, values),
        ids,
        empty(rows, **index),
        table,
        requests,
        compress_ratio=RATIO,
        token_base=empty(rows, **index),
        backend="triton",
    )


def binaries(target: str, steps: list[tuple[int, int, bool]]) -> set[str]:
    with record(target) as launches:
        for arguments in steps:
            step(*arguments)
    return {launch.specialise(TARGETS[target]).key for launch in launches}


@pytest.mark.parametrize("target", ["sm_86", "sm_90"])
def test_the_length_of_a_step_is_no_constant(target):
    decodes = [(1, length, True) for length in range(600, 4900, 7)]
    assert len(binaries(target, decodes)) < 16
    prompts = [(length, length, False) for length in range(600, 4900, 97)]
    assert len(binaries(target, prompts)) < 32
