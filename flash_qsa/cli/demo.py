"""flash-qsa demo: the main job on real input with nothing to download."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

DOCUMENT_BYTES = 16_384
"""How much of the project's own Markdown the demo reads; a byte is a token."""


def demo(
    model: Annotated[
        Path | None, typer.Option(help="A real checkpoint instead of the small one.")
    ] = None,
    prompt_file: Annotated[
        Path | None, typer.Option(help="Your document instead of the project's own.")
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens to generate.")] = 32,
    chunk: Annotated[int, typer.Option(min=1, help="Prompt tokens of one prefill step.")] = 1024,
    cache: Annotated[Path | None, typer.Option(help="Where the small checkpoint goes.")] = None,
) -> None:
    """Read a long document with a Qwen4-Exp model, by flash-qsa and by stock transformers.

    Without --model it writes a small random checkpoint with the whole architecture to the cache
    folder. It says nothing sensible, but does so through every part of a real one.
    """
    from flash_qsa.cli.generate import read_prompt, run

    if prompt_file is None:
        text = project_documents(DOCUMENT_BYTES)
        typer.echo(f"document: the project's own Markdown, {len(text.encode()):,} bytes")
    else:
        text = read_prompt(None, prompt_file)
    if model is None:
        model = write_checkpoint(cache or default_cache())
        typer.echo(f"model: a small random Qwen4-Exp, written to {model}")
    run(model, text, max_new_tokens=max_new_tokens, chunk=chunk, compare_stock=True)


def default_cache() -> Path:
    """The user's cache folder for the demo's checkpoint."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "flash-qsa" / "demo-checkpoint"


def project_documents(limit: int) -> str:
    """The project's Markdown, joined in a fixed order and cut to `limit` bytes.

    Raises:
        typer.BadParameter: an installed package without its repository.
    """
    root = Path(__file__).resolve().parents[2]
    paths = [root / name for name in ("README.md", "DESIGN.md", "CONTRIBUTING.md")]
    paths += sorted((root / "docs").glob("*.md"))
    texts = [path.read_text(encoding="utf-8") for path in paths if path.is_file()]
    joined = "\n\n".join(texts).encode()
    if not joined:
        raise typer.BadParameter("this installation has no documents; name a --prompt-file")
    return joined[:limit].decode(errors="ignore")


def write_checkpoint(folder: Path) -> Path:
    """A small Qwen4-Exp checkpoint and its byte-level tokenizer, as save_pretrained writes them.

    Three gated delta net layers to one QSA layer, as in the real model; with a budget of 32 tokens
    attention is sparse from the 36th on.
    """
    from transformers import ByT5Tokenizer

    from flash_qsa.cli.decoding import quiet_transformers
    from flash_qsa.testing.tiny_models import tiny_text_model

    quiet_transformers()
    model = tiny_text_model(full_attention_interval=4, indexer_budget=32)
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    ByT5Tokenizer().save_pretrained(folder)
    return folder
