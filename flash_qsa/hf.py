"""Short name of `flash_qsa.integrations.transformers`: importing it registers "qsa"."""

from flash_qsa.integrations.transformers import NAME, is_enabled, patch, register, unpatch

__all__ = ["NAME", "is_enabled", "patch", "register", "unpatch"]
