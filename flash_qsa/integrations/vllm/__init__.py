"""flash-qsa inside vLLM: the attention layer of Qwen4-Exp models, replaced by ours.

vLLM finds `plugin.register` through the entry point `vllm.general_plugins` and calls it in every
process. It only registers architecture names; `models` is imported where a model is built. Modules
that need vLLM say so in their first lines, all others import without it.

`docs/vllm.md` is the page for those who serve models.
"""
