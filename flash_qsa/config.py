"""What a QSA layer is made of: a frozen, validated description, independent of any framework.

This module imports nothing but the standard library, so a configuration can be read, checked and
printed on a machine without torch.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

QSA_LAYER_TYPES = ("indexed_attention", "qwen_sparse_attention", "full_attention")
"""Spellings under which exports name the same layer. "full_attention" means QSA only where the
index fields are present; without them it is ordinary attention."""

_INDEX_FIELDS = {
    "indexer_n_heads": "index_heads",
    "indexer_kv_heads": "index_kv_heads",
    "indexer_head_dim": "index_head_dim",
    "indexer_budget": "token_budget",
    "indexer_compress_ratio": "compress_ratio",
}


def _positive(owner: str, **values: int) -> None:
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
            raise ValueError(f"{owner}.{name} must be a positive integer, got {value!r}")


@dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding parameters (Su et al. 2021), optionally YaRN-scaled (Peng et al. 2023).

    Attributes:
        theta: base of the inverse frequencies.
        rotary_dim: number of leading head channels that rotate; even.
        max_positions: length of the table; a position at or past it is refused.
        rope_type: "default" or "yarn".
        factor, original_max_positions, beta_fast, beta_slow, attention_factor, mscale,
            mscale_all_dim, truncate: YaRN's parameters; ignored by "default".
        mrope_section: channels (of rotary_dim / 2) for the temporal, height and width axes, or None
            for text-only positions.
        mrope_interleaved: axes alternate channel by channel (T H W T H W …) rather than in runs.
        neox_style: a channel rotates with the one half the rotary dim away; otherwise with its
            neighbour.
    """

    theta: float = 10_000.0
    rotary_dim: int = 64
    max_positions: int = 32_768
    rope_type: str = "default"
    factor: float = 1.0
    original_max_positions: int | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    mrope_section: tuple[int, int, int] | None = None
    mrope_interleaved: bool = True
    neox_style: bool = True

    def __post_init__(self) -> None:
        _positive("RopeConfig", rotary_dim=self.rotary_dim, max_positions=self.max_positions)
        if self.rotary_dim % 2:
            raise ValueError(f"RopeConfig.rotary_dim must be even, got {self.rotary_dim}")
        if self.rope_type not in ("default", "yarn"):
            raise ValueError(
                f"RopeConfig.rope_type must be 'default' or 'yarn', got {self.rope_type!r}"
            )
        if self.rope_type == "yarn" and not self.factor >= 1:
            raise ValueError(f"RopeConfig.factor must be at least 1 for YaRN, got {self.factor}")
        if not self.theta > 0:
            raise ValueError(f"RopeConfig.theta must be positive, got {self.theta}")
        if self.mrope_section is not None:
            object.__setattr__(self, "mrope_section", tuple(self.mrope_section))
            if len(self.mrope_section) != 3 or sum(self.mrope_section) != self.rotary_dim // 2:
                raise ValueError(
                    "RopeConfig.mrope_section must hold three sizes that sum to rotary_dim / 2 = "
                    f"{self.rotary_dim // 2}, got {self.mrope_section}"
                )


@dataclass(frozen=True)
class QSAConfig:
    """Geometry of one QSA layer.

    The defaults are Qwen3.8-Flash-Next's. Every size is free: nothing in the library is written
    for 4 index heads, 2,048 tokens or ratio 4.

    Attributes:
        hidden_size: width of the layer's input and output.
        num_heads, num_kv_heads, head_dim: the main attention's Hq, Hkv and D.
        index_heads, index_kv_heads, index_head_dim: the indexer's Hi, its single key head, Di.
        token_budget: tokens a query may choose from complete blocks.
        compress_ratio: C, consecutive tokens of a block.
        rms_norm_eps: epsilon of all four zero-centred norms.
        rope: the rotary embedding shared by index and main heads.

    Raises:
        ValueError: naming the field and the value it holds.
    """

    hidden_size: int = 2560
    num_heads: int = 24
    num_kv_heads: int = 2
    head_dim: int = 256
    index_heads: int = 4
    index_kv_heads: int = 1
    index_head_dim: int = 128
    token_budget: int = 2048
    compress_ratio: int = 4
    rms_norm_eps: float = 1e-6
    rope: RopeConfig = field(
        default_factory=lambda: RopeConfig(
            theta=1e7, rotary_dim=64, max_positions=262_144, mrope_section=(11, 11, 10)
        )
    )

    def __post_init__(self) -> None:
        _positive(
            "QSAConfig",
            hidden_size=self.hidden_size,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            index_heads=self.index_heads,
            index_kv_heads=self.index_kv_heads,
            index_head_dim=self.index_head_dim,
            token_budget=self.token_budget,
            compress_ratio=self.compress_ratio,
        )
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"QSAConfig.num_heads ({self.num_heads}) must be a multiple of num_kv_heads "
                f"({self.num_kv_heads})"
            )
        if self.index_kv_heads != 1:
            raise ValueError(f"QSAConfig.index_kv_heads must be 1, got {self.index_kv_heads}")
        if self.token_budget < self.compress_ratio:
            raise ValueError(
                f"QSAConfig.token_budget ({self.token_budget}) must hold at least one block of "
                f"compress_ratio = {self.compress_ratio} tokens"
            )
        if not self.rms_norm_eps > 0:
            raise ValueError(f"QSAConfig.rms_norm_eps must be positive, got {self.rms_norm_eps}")
        if self.rope.rotary_dim > min(self.head_dim, self.index_head_dim):
            raise ValueError(
                f"QSAConfig.rope.rotary_dim ({self.rope.rotary_dim}) must fit head_dim "
                f"({self.head_dim}) and index_head_dim ({self.index_head_dim})"
            )

    @property
    def top_k(self) -> int:
        """K: blocks a query may select."""
        return self.token_budget // self.compress_ratio

    @property
    def selection_width(self) -> int:
        """W: token columns of a packed selection, blocks plus the open group's C - 1."""
        return self.token_budget + self.compress_ratio - 1

    @property
    def packed_width(self) -> int:
        """Columns of a packed selection with its trailing count."""
        return self.selection_width + 1

    @property
    def scale(self) -> float:
        """Softmax scale of the main attention."""
        return self.head_dim**-0.5

    @property
    def group_size(self) -> int:
        """G: query heads that share a KV head."""
        return self.num_heads // self.num_kv_heads

    @staticmethod
    def is_qsa_layer(hf_config: Any, layer_idx: int) -> bool:
        """Whether layer `layer_idx` of a transformers (or dict) config is a QSA layer."""
        text = _text_config(hf_config)
        layer_types = _get(text, "layer_types")
        if layer_types is None:
            interval = _get(text, "full_attention_interval", 4)
            kind = "full_attention" if (layer_idx + 1) % interval == 0 else "linear_attention"
        elif not 0 <= layer_idx < len(layer_types):
            raise ValueError(
                f"layer_idx {layer_idx} is outside layer_types, which has {len(layer_types)}"
            )
        else:
            kind = layer_types[layer_idx]
        return kind in QSA_LAYER_TYPES and _get(text, "indexer_n_heads") is not None

    @classmethod
    def from_hf(cls, hf_config: Any) -> QSAConfig:
        """Reads a transformers Qwen4-Exp config (text or multimodal; object or dict).

        Raises:
            ValueError: a missing or impossible field, named with its value.
        """
        text = _text_config(hf_config)
        missing = [name for name in _INDEX_FIELDS if _get(text, name) is None]
        if missing:
            raise ValueError(
                f"the config has no QSA layer: fields {missing} are missing or None; without them "
                "a 'full_attention' layer is ordinary attention"
            )
        hidden = _require(text, "hidden_size")
        heads = _require(text, "num_attention_heads")
        head_dim = _get(text, "head_dim") or hidden // heads
        return cls(
            hidden_size=hidden,
            num_heads=heads,
            num_kv_heads=_get(text, "num_key_value_heads", heads),
            head_dim=head_dim,
            rms_norm_eps=_get(text, "rms_norm_eps", 1e-6),
            rope=_rope_from_hf(text, head_dim),
            **{ours: _get(text, theirs) for theirs, ours in _INDEX_FIELDS.items()},
        )


def _get(config: Any, name: str, default: Any = None) -> Any:
    value = config.get(name) if isinstance(config, dict) else getattr(config, name, None)
    return default if value is None else value


def _require(config: Any, name: str) -> Any:
    value = _get(config, name)
    if value is None:
        raise ValueError(f"the config has no field {name!r}")
    return value


def _text_config(config: Any) -> Any:
    return _get(config, "text_config", config)


def _rope_from_hf(text: Any, head_dim: int) -> RopeConfig:
    rope = dict(_get(text, "rope_parameters") or _get(text, "rope_scaling") or {})
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "mrope":
        kind = "default"
    if kind not in ("default", "yarn"):
        raise ValueError(f"rope_parameters.rope_type must be 'default' or 'yarn', got {kind!r}")
    if "dual_chunk_attention_config" in rope or _get(text, "dual_chunk_attention_config"):
        raise ValueError("dual_chunk_attention_config is not supported: QSA has one rotary table")
    partial = rope.get("partial_rotary_factor", _get(text, "partial_rotary_factor", 1.0))
    section = rope.get("mrope_section")
    yarn = {
        name: rope[name]
        for name in (
            "factor",
            "beta_fast",
            "beta_slow",
            "attention_factor",
            "mscale",
            "mscale_all_dim",
            "truncate",
        )
        if rope.get(name) is not None
    }
    return RopeConfig(
        theta=float(rope.get("rope_theta", _get(text, "rope_theta", 10_000.0))),
        rotary_dim=int(head_dim * partial),
        max_positions=_get(text, "max_position_embeddings", 32_768),
        rope_type=kind,
        original_max_positions=rope.get("original_max_position_embeddings"),
        mrope_section=None if section is None else tuple(section),
        mrope_interleaved=rope.get("mrope_interleaved", True),
        **(yarn if kind == "yarn" else {}),
    )
