"""Zero-centred RMSNorm as a module."""

from __future__ import annotations

import torch
from torch import nn

from flash_qsa.ops.norm import rms_norm


class ZeroCentredRMSNorm(nn.Module):
    """x / rms(x) · (1 + weight) over the last axis; a new module has gain one."""

    def __init__(
        self,
        dim: int,
        eps: float = 1e-6,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(dim, device=device, dtype=dtype))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, self.weight, self.eps)

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, eps={self.eps}"
