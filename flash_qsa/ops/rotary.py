"""Rotary position embedding: the table, its mRoPE lookup, and the rotation.

Index heads and main heads use one `RopeTable`: the same rows, the same dtype, the leading
`rotary_dim` channels alone.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from flash_qsa.config import RopeConfig
from flash_qsa.ops.norm import wide


def canonical_positions(positions: torch.Tensor) -> torch.Tensor:
    """`[T]`, `[1, T]`, `[3, T]` or canonical positions → int64 `[T, 1, 3]` (T, H, W axes).

    Raises:
        ValueError: any other shape.
    """
    if positions.dim() == 3 and positions.shape[1:] == (1, 3):
        return positions.to(torch.int64)
    if positions.dim() == 1:
        return positions.to(torch.int64)[:, None, None].expand(-1, 1, 3)
    if positions.dim() != 2 or positions.shape[0] not in (1, 3):
        raise ValueError(
            "positions: expected shape [T], [1, T], [3, T] or [T, 1, 3], "
            f"got {list(positions.shape)}"
        )
    return positions.to(torch.int64).t()[:, None].expand(-1, 1, 3)


@dataclass(frozen=True)
class RopeTable:
    """Cosines and sines of every position.

    Attributes:
        cos_sin: [max_positions, rotary_dim] in the activation dtype: cosines of the rotary_dim / 2
            frequencies, then their sines, YaRN's magnitude included.
        mrope_section: channels of the T, H and W axes, or None where all axes agree.
        mrope_interleaved: axes alternate channel by channel rather than in runs.
        neox_style: channel i rotates with channel i + rotary_dim / 2, otherwise 2i with 2i + 1.
    """

    cos_sin: torch.Tensor
    mrope_section: tuple[int, int, int] | None = None
    mrope_interleaved: bool = True
    neox_style: bool = True

    @classmethod
    def from_config(
        cls,
        config: RopeConfig,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        max_positions: int | None = None,
    ) -> RopeTable:
        """Builds the table in FP32 and rounds it once to `dtype`."""
        count = config.max_positions if max_positions is None else max_positions
        inverse, magnitude = inverse_frequencies(config)
        angles = torch.arange(count, dtype=torch.float32)[:, None] * inverse
        cos_sin = torch.cat((angles.cos() * magnitude, angles.sin() * magnitude), dim=-1)
        return cls(
            cos_sin.to(device=device, dtype=dtype),
            config.mrope_section,
            config.mrope_interleaved,
            config.neox_style,
        )

    @property
    def rotary_dim(self) -> int:
        return self.cos_sin.shape[1]

    @property
    def max_positions(self) -> int:
        return self.cos_sin.shape[0]

    def require(self, max_seq_len: int) -> None:
        """Refuses sequences that the table does not cover (a host check, made once a step)."""
        if max_seq_len > self.max_positions:
            raise ValueError(
                f"positions: a sequence of {max_seq_len} tokens needs a rotary table of that many "
                f"rows, this one has {self.max_positions}"
            )

    def axis_of_channel(self, device: torch.device | str = "cpu") -> torch.Tensor:
        """int64 [rotary_dim / 2]: which of T, H, W gives each frequency its position.

        Computed where it is used: a captured graph may not copy from the host.
        """
        channel = torch.arange(self.rotary_dim // 2, device=device)
        if self.mrope_section is None:
            return torch.zeros_like(channel)
        temporal, height, width = self.mrope_section
        if self.mrope_interleaved:
            turn = channel % 3
            is_height = (turn == 1) & (channel < 3 * height)
            is_width = (turn == 2) & (channel < 3 * width)
            return is_height.long() + 2 * is_width.long()
        return (channel >= temporal).long() + (channel >= temporal + height).long()

    def rows(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines [T, rotary_dim / 2] at `positions` (any shape that
        `canonical_positions` takes).

        Raises:
            IndexError: a position outside the table (on the CPU, outside a traced program; a
                device lookup must not wait for the host, see `require`).
        """
        axes = canonical_positions(positions)[:, 0, :]
        if axes.device.type == "cpu" and axes.numel() and not torch.compiler.is_compiling():
            low, high = int(axes.min()), int(axes.max())
            if low < 0 or high >= self.max_positions:
                raise IndexError(
                    f"positions: {high if high >= self.max_positions else low} is outside the "
                    f"rotary table of {self.max_positions} rows"
                )
        per_channel = axes[:, self.axis_of_channel(axes.device)]
        cos, sin = self.cos_sin.chunk(2, dim=-1)
        return cos.gather(0, per_channel), sin.gather(0, per_channel)

    def apply(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Rotates x [T, ..., D] at `positions`; the arithmetic is FP32, rounded once."""
        cos, sin = self.rows(positions)
        return rotate(x, cos, sin, self.neox_style)


def rotate(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, neox_style: bool = True
) -> torch.Tensor:
    """Rotates the leading channels of x [T, ..., D] by per-row cos, sin [T, rotary_dim / 2]."""
    half = cos.shape[-1]
    shape = (x.shape[0],) + (1,) * (x.dim() - 2) + (half,)
    rotated, passed = wide(x[..., : 2 * half]), x[..., 2 * half :]
    cos, sin = (wide(c).to(rotated.dtype).view(shape) for c in (cos, sin))
    if neox_style:
        first, second = rotated[..., :half], rotated[..., half:]
    else:
        first, second = rotated[..., 0::2], rotated[..., 1::2]
    turned = (first * cos - second * sin, second * cos + first * sin)
    joined = torch.cat(turned, -1) if neox_style else torch.stack(turned, -1).flatten(-2)
    return torch.cat((joined.to(x.dtype), passed), dim=-1)


def inverse_frequencies(config: RopeConfig) -> tuple[torch.Tensor, float]:
    """FP32 [rotary_dim / 2] inverse frequencies and the magnitude of cosines and sines.

    YaRN (Peng et al. 2023, section 3.2 and equation 22): a frequency that turns more than
    `beta_fast` times within the original context is kept, one that turns fewer than `beta_slow`
    times is divided by `factor`, the ramp between them is linear in the channel.
    """
    dim = config.rotary_dim
    inverse = 1.0 / (config.theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim))
    if config.rope_type == "default":
        return inverse, 1.0
    original = config.original_max_positions or config.max_positions

    def channel_turning(turns: float) -> float:
        return dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(config.theta))

    low, high = channel_turning(config.beta_fast), channel_turning(config.beta_slow)
    if config.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001
    ramp = ((torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    blended = inverse / config.factor * ramp + inverse * (1 - ramp)
    return blended, _yarn_magnitude(config)


def _yarn_magnitude(config: RopeConfig) -> float:
    if config.attention_factor is not None:
        return config.attention_factor

    def grown(weight: float) -> float:
        return 0.1 * weight * math.log(config.factor) + 1.0 if config.factor > 1 else 1.0

    if config.mscale and config.mscale_all_dim:
        return grown(config.mscale) / grown(config.mscale_all_dim)
    return grown(1.0)
