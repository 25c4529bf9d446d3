"""flash-qsa: the command line. Each command is one file; nothing heavy is imported to show help."""

from __future__ import annotations

import typer

from flash_qsa.cli.bench import bench
from flash_qsa.cli.demo import demo
from flash_qsa.cli.env import env
from flash_qsa.cli.generate import generate
from flash_qsa.cli.verify import verify

app = typer.Typer(
    name="flash-qsa",
    help="Exact, deterministic Qwen Sparse Attention: try it, check it on your device, measure it.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_show_locals=False,
)
for command in (generate, verify, bench, env, demo):
    app.command()(command)

if __name__ == "__main__":
    app()
