"""Greedy decoding through transformers with a chunked prefill, watched step by step.

transformers' own generate() hides the prefill, and its logits at every chunk; comparing two
attention implementations needs both.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch


@dataclass
class Decoded:
    """One run.

    Attributes:
        tokens: the new tokens.
        logits: FP32 rows on the CPU: the last position of each prefill chunk, then of each new
            token.
        prefill_seconds, decode_seconds: wall time of both phases, device work included.
        peak_bytes: peak device memory of the run; on the CPU the process's peak so far.
    """

    tokens: list[int] = field(default_factory=list)
    logits: list[torch.Tensor] = field(default_factory=list)
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    peak_bytes: int = 0

    @property
    def seconds(self) -> float:
        return self.prefill_seconds + self.decode_seconds


def quiet_transformers() -> None:
    """Keeps transformers' loading bars and notes about optional kernels out of our output."""
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()


def load(path: Path, device: torch.device, dtype: torch.dtype | None) -> tuple[Any, Any]:
    """Model and tokenizer of a checkpoint directory; dtype None keeps the checkpoint's.

    Raises:
        ValueError: the directory holds no Qwen4-Exp model.
    """
    import transformers

    quiet_transformers()
    config = transformers.AutoConfig.from_pretrained(path)
    if not str(config.model_type).startswith("qwen4_exp"):
        raise ValueError(f"{path} holds a {config.model_type!r} model; QSA belongs to qwen4_exp")
    names = list(config.architectures or ["Qwen4ExpForCausalLM"])
    architecture = getattr(transformers, names[0], None)
    if architecture is None:
        raise ValueError(f"{path}: transformers {transformers.__version__} has no {names[0]}")
    model = architecture.from_pretrained(
        path, dtype="auto" if dtype is None else dtype, attn_implementation="sdpa"
    )
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    return model.to(device).eval(), tokenizer


@torch.inference_mode()
def decode(
    model: Any,
    prompt: torch.Tensor,
    max_new_tokens: int,
    chunk: int,
    *,
    on_prefill: Callable[[int], None],
    on_token: Callable[[int], None],
) -> Decoded:
    """Prefills prompt [1, N] in chunks, then decodes greedily until the end token or the limit.

    Args:
        on_prefill: called with the number of prompt tokens that a chunk added.
        on_token: called with each new token.
    """
    from transformers import DynamicCache

    cache, device = DynamicCache(config=model.config), prompt.device
    # The argument was past_key_values up to transformers 5.23.
    takes = inspect.signature(model.forward).parameters
    cache_argument = "cache" if "cache" in takes else "past_key_values"
    run, ends = Decoded(), _end_tokens(model)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)

    def step(ids: torch.Tensor) -> int:
        options = {cache_argument: cache, "use_cache": True, "logits_to_keep": 1}
        logits = model(input_ids=ids, **options).logits[0, -1].float().cpu()
        run.logits.append(logits)
        return int(logits.argmax())

    began = time.perf_counter()
    for part in prompt.split(chunk, dim=1):
        token = step(part)
        on_prefill(part.shape[1])
    run.prefill_seconds = time.perf_counter() - began

    began = time.perf_counter()
    while len(run.tokens) < max_new_tokens:
        run.tokens.append(token)
        on_token(token)
        if token in ends or len(run.tokens) == max_new_tokens:
            break
        token = step(torch.tensor([[token]], device=device))
    run.decode_seconds = time.perf_counter() - began
    run.peak_bytes = _peak_bytes(device)
    return run


def _end_tokens(model: Any) -> set[int]:
    ends = model.generation_config.eos_token_id
    return set() if ends is None else {ends} if isinstance(ends, int) else set(ends)


def _peak_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    import resource
    import sys

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


@dataclass(frozen=True)
class Agreement:
    """How two runs compare.

    Attributes:
        same_tokens: all new tokens are equal.
        first_difference: index of the first unequal token, or None.
        logit_error: largest absolute difference of logits, over all positions before the runs part.
        compared: how many positions that were.
        allowed: bound on logit_error below which the runs count as equal.
    """

    same_tokens: bool
    first_difference: int | None
    logit_error: float
    compared: int
    allowed: float

    @property
    def equal(self) -> bool:
        return self.same_tokens and self.logit_error <= self.allowed


def compare(ours: Decoded, stock: Decoded, dtype: torch.dtype) -> Agreement:
    """Tokens and logits of two runs over the same prompt.

    FP32 logits must agree within 1e-5 of their largest value. A 16-bit model rounds every layer's
    output, and two correct paths round differently: each of its units in the last place counts up
    to 16 times, which is what tens of layers make of it.
    """
    first = next(
        (i for i, (a, b) in enumerate(zip(ours.tokens, stock.tokens)) if a != b),
        None if len(ours.tokens) == len(stock.tokens) else min(len(ours.tokens), len(stock.tokens)),
    )
    chunks = len(stock.logits) - max(len(stock.tokens) - 1, 0)
    compared = min(len(ours.logits), len(stock.logits))
    if first is not None:
        compared = min(compared, chunks + first)
    pairs = list(zip(ours.logits, stock.logits))[:compared]
    error = largest = 0.0
    if pairs:
        a, b = (torch.stack(side).double() for side in zip(*pairs))
        error = float((a - b).abs().max())  # NaN where either side has one
        largest = float(b.abs().max())
    unit = 1e-5 if dtype == torch.float32 else 16 * torch.finfo(dtype).eps
    return Agreement(first is None, first, error, compared, unit * max(largest, 1.0))
