"""Names of cache dtypes, as serving engines and checkpoints spell them."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from flash_qsa.checks import FLOAT_DTYPES, UnsupportedError

FP8_CACHE_DTYPES = ("fp8", "fp8_e4m3")
MAIN_CACHE_DTYPES = ("auto", "bfloat16", *FP8_CACHE_DTYPES)


def index_cache_dtype(
    name: str,
    activation: torch.dtype,
    *,
    setting: str = "index_cache_dtype",
    fp8_name: str = "fp8_e4m3",
) -> torch.dtype:
    """Storage of the compressed keys.

    "bf16" stores what the model computes in, so FP16 and FP32 models keep their own dtype;
    `fp8_name` stores e4m3 without scales, for the keys are normed. Errors name `setting`.

    Raises:
        UnsupportedError: another name, or an activation dtype that QSA does not run in.
    """
    _require_activation(activation)
    if name not in ("bf16", fp8_name):
        raise UnsupportedError(f"{setting}: expected 'bf16' or {fp8_name!r}, got {name!r}")
    return torch.float8_e4m3fn if name == fp8_name else activation


def require_main_cache_dtype(name: str, setting: str) -> None:
    """Requires a name of a main cache's dtype; the UnsupportedError names `setting`."""
    if name not in MAIN_CACHE_DTYPES:
        raise UnsupportedError(
            f"{setting}: expected one of {', '.join(MAIN_CACHE_DTYPES)}, got {name!r}"
        )


def main_cache_dtype(
    name: str, activation: torch.dtype, *, setting: str = "cache_dtype"
) -> torch.dtype:
    """Storage of keys and values: "auto" is what the model computes in. Errors name `setting`.

    Raises:
        UnsupportedError: another name, "bfloat16" in a model of another dtype, or an activation
            dtype that QSA does not run in.
    """
    _require_activation(activation)
    require_main_cache_dtype(name, setting)
    if name in FP8_CACHE_DTYPES:
        return torch.float8_e4m3fn
    if name == "bfloat16" and activation != torch.bfloat16:
        raise UnsupportedError(
            f"{setting}: 'bfloat16' in a {str(activation).removeprefix('torch.')} model is not "
            "supported; 'auto' stores what the model computes in"
        )
    return activation


def layer_cache_dtype(prefix: str, default: str, by_prefix: Mapping[str, str]) -> str:
    """The main cache dtype's name for the layer at `prefix`.

    The longest key of `by_prefix` that is the prefix itself, or one of its parents, decides.
    """
    parents = [key for key in by_prefix if prefix == key or prefix.startswith(f"{key}.")]
    return by_prefix[max(parents, key=len)] if parents else default


def _require_activation(activation: torch.dtype) -> None:
    if activation not in FLOAT_DTYPES:
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in FLOAT_DTYPES)
        raise UnsupportedError(
            f"dtype: {str(activation).removeprefix('torch.')} is not supported; expected {names}"
        )
