"""flash-qsa generate: run a Qwen4-Exp checkpoint, and compare it with transformers' own path."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    import torch
    from rich.console import Console

    from flash_qsa.cli.decoding import Decoded


def generate(
    model_dir: Annotated[Path, typer.Argument(help="A checkpoint directory.")],
    prompt: Annotated[str | None, typer.Option(help="The prompt itself.")] = None,
    prompt_file: Annotated[Path | None, typer.Option(help="A text file as the prompt.")] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens to generate.")] = 64,
    chunk: Annotated[int, typer.Option(min=1, help="Prompt tokens of one prefill step.")] = 2048,
    compare_stock: Annotated[
        bool, typer.Option("--compare-stock", help="Run transformers' own QSA too, and compare.")
    ] = False,
    device: Annotated[str, typer.Option(help="A torch device; auto takes a GPU if any.")] = "auto",
    dtype: Annotated[
        str, typer.Option(help="auto (the checkpoint's), bfloat16, float16 or float32.")
    ] = "auto",
    backend: Annotated[str, typer.Option(help="auto, reference or triton.")] = "auto",
) -> None:
    """Generate greedily from a Qwen4-Exp checkpoint with flash-qsa.

    With --compare-stock it exits with 1 when an FP32 model's tokens or logits differ from stock.
    """
    run(
        model_dir,
        read_prompt(prompt, prompt_file),
        max_new_tokens=max_new_tokens,
        chunk=chunk,
        compare_stock=compare_stock,
        device=device,
        dtype=dtype,
        backend=backend,
    )


def read_prompt(prompt: str | None, prompt_file: Path | None) -> str:
    """The text of exactly one of the two sources."""
    if (prompt is None) == (prompt_file is None):
        raise typer.BadParameter("give either --prompt or --prompt-file")
    if prompt_file is None:
        text = prompt or ""
    elif not prompt_file.is_file():
        raise typer.BadParameter(f"--prompt-file: {prompt_file} is not a file")
    else:
        text = prompt_file.read_text(encoding="utf-8", errors="replace")
    if not text:
        raise typer.BadParameter("the prompt is empty")
    return text


def run(
    model_dir: Path,
    text: str,
    *,
    max_new_tokens: int,
    chunk: int,
    compare_stock: bool,
    device: str = "auto",
    dtype: str = "auto",
    backend: str = "auto",
) -> None:
    """Loads, generates, reports; shared by `generate` and `demo`."""
    import os

    from rich.console import Console

    if not (model_dir / "config.json").is_file():
        raise typer.BadParameter(f"{model_dir} holds no config.json: not a checkpoint directory")
    if backend != "auto":
        os.environ["FLASH_QSA_BACKEND"] = backend
    import torch

    try:
        import flash_qsa.hf  # noqa: F401 - registers "qsa" with transformers
    except ImportError as error:
        raise typer.BadParameter(f"{error}; pip install 'flash-qsa[hf]'") from error
    from flash_qsa import dispatch
    from flash_qsa.cli.decoding import compare, load
    from flash_qsa.cli.verify import pick_device, pick_dtype

    console = Console()
    where = pick_device(device)
    wanted = None if dtype == "auto" else pick_dtype(dtype, where)
    try:
        dispatch.choose("auto", where)
        model, tokenizer = load(model_dir, where, wanted)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    ids = torch.tensor([tokenizer(text, add_special_tokens=False)["input_ids"]], device=where)
    limit = model.config.get_text_config().max_position_embeddings
    if ids.shape[1] + max_new_tokens > limit:
        raise typer.BadParameter(
            f"the prompt has {ids.shape[1]:,} tokens; with {max_new_tokens} new ones that exceeds "
            f"the model's {limit:,} positions"
        )
    kind = str(next(model.parameters()).dtype).removeprefix("torch.")
    console.print(
        f"{model_dir}: {type(model).__name__}, {kind} on {where}; "
        f"{ids.shape[1]:,} prompt tokens, chunks of {chunk:,}",
        highlight=False,
        soft_wrap=True,
    )

    model.set_attn_implementation("qsa")
    with dispatch.trace() as ran:
        ours = _watched(console, "flash-qsa", model, tokenizer, ids, max_new_tokens, chunk)
    backends = sorted({name for _, name in ran}) or ["compiled operators"]
    console.print(f"QSA ran on backend: {', '.join(backends)}", highlight=False)
    if not compare_stock:
        return
    model.set_attn_implementation("sdpa")
    stock = _watched(console, "stock", model, tokenizer, ids, max_new_tokens, chunk)
    parameter = next(model.parameters())
    _report(console, ours, stock, compare(ours, stock, parameter.dtype), parameter.dtype)


def _watched(
    console: Console,
    name: str,
    model: Any,
    tokenizer: Any,
    ids: torch.Tensor,
    max_new_tokens: int,
    chunk: int,
) -> Decoded:
    """One run with a progress bar for the prefill and the text as it comes."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from flash_qsa.cli.decoding import decode

    progress = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("tokens"),
        TimeElapsedColumn(),
        console=console,
    )
    task = progress.add_task(f"{name}: prefill", total=ids.shape[1])
    stream = _Stream(tokenizer)

    def on_token(token: int) -> None:
        if progress.live.is_started:
            progress.stop()
        console.out(stream.add(token), end="", highlight=False)

    progress.start()
    try:
        run = decode(
            model,
            ids,
            max_new_tokens,
            chunk,
            on_prefill=lambda count: progress.advance(task, count),
            on_token=on_token,
        )
    finally:
        progress.stop()
    console.out(stream.rest(), highlight=False)
    count = len(run.tokens)
    console.print(
        f"{name}: prefill {ids.shape[1] / run.prefill_seconds:,.0f} tokens/s "
        f"({run.prefill_seconds:.2f} s), decode {_rate(count - 1, run.decode_seconds)}, "
        f"peak memory {run.peak_bytes / 2**30:.2f} GiB",
        highlight=False,
        soft_wrap=True,
    )
    return run


def _rate(tokens: int, seconds: float) -> str:
    return f"{tokens / seconds:,.1f} tokens/s" if tokens and seconds else "-"


class _Stream:
    """New text as tokens come; bytes of an unfinished character wait for the rest."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.tokens: list[int] = []
        self.shown = 0

    def _printable(self) -> str:
        text = self.tokenizer.decode(self.tokens, skip_special_tokens=True)
        return "".join(
            c if c.isprintable() or c == "\n" else "\N{REPLACEMENT CHARACTER}" for c in text
        )

    def add(self, token: int) -> str:
        self.tokens.append(token)
        text = self._printable()
        if text.endswith("\N{REPLACEMENT CHARACTER}"):
            return ""
        new, self.shown = text[self.shown :], len(text)
        return new

    def rest(self) -> str:
        return self._printable()[self.shown :]


def _report(console: Console, ours: Decoded, stock: Decoded, seen: Any, dtype: Any) -> None:
    import torch

    if seen.same_tokens:
        tokens = f"all {len(ours.tokens)} tokens equal"
    else:
        tokens = f"tokens differ from new token {seen.first_difference} on"
    console.print(
        f"equality with stock: {tokens}; largest logit difference {seen.logit_error:.1e} over "
        f"{seen.compared} positions (allowed {seen.allowed:.1e}): "
        + ("EQUAL" if seen.equal else "DIFFERENT"),
        highlight=False,
        soft_wrap=True,
    )
    console.print(
        f"speed-up over stock: prefill {stock.prefill_seconds / ours.prefill_seconds:.1f}x, "
        f"whole run {stock.seconds / ours.seconds:.1f}x",
        highlight=False,
        soft_wrap=True,
    )
    if seen.equal:
        return
    console.print(
        "Where scores tie at the cut, flash-qsa takes the lower block and stock any of them; "
        "16-bit runs may also part within rounding, which --dtype float32 rules out.",
        highlight=False,
        soft_wrap=True,
    )
    if dtype == torch.float32:
        raise typer.Exit(1)
