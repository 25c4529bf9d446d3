"""How far an implementation may be from the oracle, derived from its roundings."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from flash_qsa.testing.compare import U_FP32, unit_roundoff
from flash_qsa.testing.oracle import OracleRows


def length_of(vectors: torch.Tensor) -> torch.Tensor:
    """Euclidean lengths over the last axis."""
    return torch.linalg.vector_norm(vectors, dim=-1)


@dataclass(frozen=True)
class Bounds:
    """Bounds for activations in `dtype`, main heads of `head_dim`, groups of `ratio` tokens."""

    dtype: torch.dtype
    head_dim: int
    ratio: int

    def relative(self, dim: int) -> float:
        """Normwise error of a normed and rotated vector: two roundings to the dtype of at most
        √2 each after a rotation, a sum of `dim` squares and a dozen FP32 operations."""
        return 4 * unit_roundoff(self.dtype) + (dim + 16) * U_FP32

    def vector(
        self, truth: torch.Tensor, dim: int, growth: torch.Tensor | float = 0.0
    ) -> torch.Tensor:
        relative = self.relative(dim) + growth
        if isinstance(relative, torch.Tensor):
            relative = relative[:, None]
        return (length_of(truth)[..., None] * relative).expand_as(truth)

    def pooling_growth(self, raw: torch.Tensor) -> torch.Tensor:
        """Relative error [n // C] of the pooled key: cancellation grows what the sum rounds."""
        ratio = self.ratio
        groups = raw[: raw.shape[0] // ratio * ratio].view(-1, ratio, raw.shape[1])
        mean = length_of(groups.mean(1))
        unit = (ratio + 2) * U_FP32
        return unit * length_of(groups.abs().mean(1)) / mean + unit_roundoff(self.dtype)

    def scores(self, rows: OracleRows, token: int, keys: torch.Tensor) -> torch.Tensor:
        """How far two scores of a row may move against each other."""
        query = rows.index_query[token]
        growth = self.pooling_growth(rows.raw_key)[: keys.shape[0]]
        relative = 2 * self.relative(query.shape[1]) + growth
        return 2 * (length_of(query).sum() * length_of(keys) * relative).max()

    def attention(self, rows: OracleRows, start: int) -> torch.Tensor:
        """Largest error [n - start] of a request's rows from `start` on.

        Scores err by the keys' and queries' own errors and a sum of D products, which moves
        probabilities by e^±2δ; probabilities and output are rounded, sums run over n tokens.
        """
        dim, u, count = self.head_dim, unit_roundoff(self.dtype), rows.key.shape[0]
        reach = length_of(rows.query[start:]).amax(-1) * length_of(rows.key).max()
        delta = dim**-0.5 * reach * (2 * self.relative(dim) + (dim + 2) * U_FP32)
        relative = torch.expm1(2 * delta) + 4 * u + 2 * (count + 12) * U_FP32
        return rows.value.abs().max() * relative
