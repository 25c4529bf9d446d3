"""A rule for equal scores in transformers' own indexer, so that it can be an oracle.

It takes whichever blocks `Tensor.topk` returns among equal scores, and scores of exactly zero are
ordinary behind a ReLU. Under `lower_ids_first` the method prefers the lower id, as our ops do.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch


def _lower_ids_first(scores, k, dim=-1, largest=True, sorted=True, *, near: float):
    values, indices = scores.sort(dim=dim, descending=largest, stable=True)
    if near and scores.shape[dim] > k:
        gap = values.select(dim, k - 1) - values.select(dim, k)
        if ((gap > 0) & (gap < near)).any():
            raise ArithmeticError("two scores nearly tie: the test's input needs another seed")
    return torch.return_types.topk((values.narrow(dim, 0, k), indices.narrow(dim, 0, k)))


@contextlib.contextmanager
def lower_ids_first(near: float = 1e-5) -> Iterator[None]:
    """Inside, the method `topk` of floating-point tensors breaks ties by the lower index.

    Only the method: the models' router calls the function `torch.topk`, and our ops rank integers.

    Args:
        near: two implementations may differ by rounding, and no comparison should hang on that: a
            gap at the cut that is positive and below this raises ArithmeticError. 0 allows any.
    """
    original = torch.Tensor.topk

    def topk(self, *args, **kwargs):
        if self.is_floating_point():
            return _lower_ids_first(self, *args, near=near, **kwargs)
        return original(self, *args, **kwargs)

    torch.Tensor.topk = topk
    try:
        yield
    finally:
        torch.Tensor.topk = original
