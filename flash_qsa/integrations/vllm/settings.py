"""Options of the vLLM integration, from the environment and from --additional-config.

`FLASH_QSA_VLLM=0` leaves vLLM as it is. `--additional-config '{"flash_qsa": {...}}'` takes the
fields of `Settings`; `{"flash_qsa": false}` is short for `{"flash_qsa": {"enabled": false}}`.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, fields
from typing import Any

from flash_qsa.dispatch import BACKENDS

SWITCH = "FLASH_QSA_VLLM"
CONFIG_KEY = "flash_qsa"


def enabled_in_environment() -> bool:
    """Whether FLASH_QSA_VLLM allows the plugin; unset means yes.

    Raises:
        ValueError: a value other than 0 and 1.
    """
    value = os.environ.get(SWITCH, "1")
    if value not in ("0", "1"):
        raise ValueError(f"{SWITCH}: expected 0 or 1, got {value!r}")
    return value == "1"


@dataclass(frozen=True)
class Settings:
    """How the layers of one engine run.

    Attributes:
        enabled: build our attention layer; otherwise vLLM's own.
        backend: "auto", "reference" or "triton", as every op takes it.
        deterministic: attention whose bits do not depend on the rest of the batch. vLLM's batch
            invariance (VLLM_BATCH_INVARIANT=1) turns it on too.
        workspace_mib: memory that scoring may hold at a time, or None for vLLM's own limit,
            VLLM_SPARSE_INDEXER_MAX_LOGITS_MB.
        fused_prepare: one launch between the projections and the selection; false runs separate
            ops with the same result, to narrow a fault down.
    """

    enabled: bool = True
    backend: str = "auto"
    deterministic: bool = False
    workspace_mib: int | None = None
    fused_prepare: bool = True

    @classmethod
    def from_config(cls, additional_config: Any) -> Settings:
        """Reads `VllmConfig.additional_config`.

        Raises:
            ValueError: an unknown field, or a value of the wrong kind, named with the value seen.
        """
        given = additional_config.get(CONFIG_KEY) if isinstance(additional_config, dict) else None
        if given is None:
            return cls()
        if isinstance(given, bool):
            return cls(enabled=given)
        if not isinstance(given, dict):
            raise ValueError(f"additional_config.{CONFIG_KEY}: expected an object, got {given!r}")
        known = [field.name for field in fields(cls)]
        for name in given:
            if name not in known:
                raise ValueError(
                    f"additional_config.{CONFIG_KEY}.{name}: unknown; known are {', '.join(known)}"
                )
        settings = cls(**given)
        for name in ("enabled", "deterministic", "fused_prepare"):
            if not isinstance(getattr(settings, name), bool):
                raise ValueError(
                    f"additional_config.{CONFIG_KEY}.{name}: expected true or false, "
                    f"got {getattr(settings, name)!r}"
                )
        if settings.backend not in BACKENDS:
            raise ValueError(
                f"additional_config.{CONFIG_KEY}.backend: expected one of {', '.join(BACKENDS)}, "
                f"got {settings.backend!r}"
            )
        size = settings.workspace_mib
        if size is not None and (isinstance(size, bool) or not isinstance(size, int) or size < 1):
            raise ValueError(
                f"additional_config.{CONFIG_KEY}.workspace_mib: expected a positive integer, "
                f"got {size!r}"
            )
        return settings
