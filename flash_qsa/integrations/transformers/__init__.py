"""QSA in Hugging Face transformers: `import flash_qsa.hf`, then `attn_implementation="qsa"`.

Importing registers the implementation. Models are switched by name, as any other::

    model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="qsa")
    model.set_attn_implementation("qsa")

or, where wrappers are in the way, by `patch(model)`. Works with transformers 5.16 and later.
"""

from flash_qsa.integrations.transformers.registration import (
    NAME,
    is_enabled,
    patch,
    register,
    unpatch,
)

__all__ = ["NAME", "is_enabled", "patch", "register", "unpatch"]

register()
