"""torch.library operators: what torch.compile sees instead of an op's insides.

Every op is registered as `torch.ops.flash_qsa.<op>` with a schema that declares what it writes and
a fake that computes nothing. While a program is traced `dispatch.implementation` hands out `traced`
instead of an implementation; eager calls never pass through here, so decoding pays no dispatcher.
Plans, norms, caches and rotary tables are flattened to tensors and integers for the schema. Both
backends stay opaque: the choice between them is made when the operator runs.

Only `sparse_attention` records gradients.
"""

from flash_qsa.library import attention, state
from flash_qsa.library.registry import traced

__all__ = ["attention", "state", "traced"]
