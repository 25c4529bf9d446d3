"""What vLLM's own QSA needs in order to run on a CPU, each installed after its module's import.

None of it touches flash-qsa. vLLM's selection calls a compiled top-k and its attention merges
split partial sums with an operation that Triton's interpreter lacks; both are replaced here by the
plainest equivalent.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

QSA = "vllm.models.qwen4_exp.nvidia"


def no_dependent_launch(module: Any) -> None:
    module._metadata_launch_pdl = lambda: False


def top_k_in_torch(module: Any) -> None:
    """The K best visible columns (score descending, column ascending), -1 behind them."""
    import torch

    def top_k(logits, visible_blocks, token_topk, compress_ratio, block_indices, workspace):
        columns = torch.arange(logits.shape[1])
        hidden = columns >= visible_blocks[:, None]
        scores = logits.masked_fill(hidden, float("-inf"))
        order = scores.sort(dim=1, descending=True, stable=True).indices
        count = min(token_topk // compress_ratio, logits.shape[1])
        order = order[:, :count].int()
        live = torch.arange(count) < visible_blocks[:, None]
        block_indices.fill_(-1)
        block_indices[:, :count] = torch.where(live, order, -1)

    module._topk = top_k


def one_split(module: Any) -> None:
    select = module._select_config
    module._select_config = lambda *args, **kwargs: (*select(*args, **kwargs)[:3], 1)


def fused_without_cuda(module: Any) -> None:
    """vLLM's layer asks for flash-attn, which it never runs, and keeps its fused launch to CUDA."""
    module.is_flash_attn_varlen_func_available = lambda: True
    platform = module.current_platform
    module.current_platform = SimpleNamespace(
        is_cuda=platform.is_cuda,
        has_device_capability=lambda capability: True,  # FP8 as a type, not as bytes
    )
    build = module.Qwen4ExpQSAAttention.__init__

    def init(self, *args, **kwargs):
        build(self, *args, **kwargs)
        self.use_fused_qsa_prepare = self.indexer.use_fused_pre_indexer

    module.Qwen4ExpQSAAttention.__init__ = init


def plain_products(module: Any) -> None:
    """On a CPU with AMX vLLM asks for kernels that only its CPU build brings."""
    module.check_cpu_sgl_kernel = lambda n, k, dtype: False


AFTER_IMPORT = {
    "vllm.models.qwen4_exp.common.qsa_cache": no_dependent_launch,
    f"{QSA}.ops.qsa_indexer": top_k_in_torch,
    f"{QSA}.ops.qsa": one_split,
    f"{QSA}.qsa": fused_without_cuda,
}

IN_THE_CUDA_WHEEL = {"vllm.model_executor.layers.utils": plain_products}
