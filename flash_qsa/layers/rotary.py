"""The rotary table as a module that layers share."""

from __future__ import annotations

import torch
from torch import nn

from flash_qsa.config import RopeConfig
from flash_qsa.ops.rotary import RopeTable


class QSARotary(nn.Module):
    """Cosines and sines for index and main heads, in the activation dtype.

    One instance serves all layers of a model. A change of dtype or device builds the table again,
    because casting it would round it twice.

    Args:
        config: of the rotary embedding.
        max_positions: rows of the table; the config's by default.
    """

    def __init__(
        self,
        config: RopeConfig,
        max_positions: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        self.max_positions = config.max_positions if max_positions is None else max_positions
        self._build(device or "cpu", dtype or torch.get_default_dtype())

    def _build(self, device: torch.device | str, dtype: torch.dtype) -> None:
        table = RopeTable.from_config(self.config, dtype, device, self.max_positions)
        self.register_buffer("cos_sin", table.cos_sin, persistent=False)

    def _apply(self, fn, recurse: bool = True):
        before = self.cos_sin
        super()._apply(fn, recurse)
        after = self.cos_sin
        if after.dtype != before.dtype or before.is_meta:
            self._build(after.device, after.dtype)
        return self

    def table(self) -> RopeTable:
        """What the ops take."""
        return RopeTable(
            self.cos_sin,
            self.config.mrope_section,
            self.config.mrope_interleaved,
            self.config.neox_style,
        )
