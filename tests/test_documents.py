"""What the documents say is true of the tree.

* The README's library example runs, and equals the same layer over the whole sequence at once.
* Every relative link leads somewhere; every `make` target and `flash-qsa` command that a document
  names exists, with the options it is shown with.
* The README's results, the architecture picture and the coverage table are the generated ones.
* CI runs the README's test command, and a tier that fails or finds no test fails it.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from typer.main import get_command

from flash_qsa.cli.main import app

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "DESIGN.md")]
DOCUMENTS += [*sorted((ROOT / "docs").glob("*.md")), ROOT / "benchmarks" / "README.md"]
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
TARGETS = {t for line in re.findall(r"^([a-z][a-z -]*):", MAKEFILE, re.M) for t in line.split()}


def script(path: str):
    spec = importlib.util.spec_from_file_location(Path(path).stem, ROOT / path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up while being made
    spec.loader.exec_module(module)
    return module


def code_of(document: Path) -> str:
    """All that is set as code in a document."""
    text = document.read_text(encoding="utf-8")
    fenced = re.findall(r"```[a-z]*\n(.*?)```", text, re.S)
    return "\n".join(
        [*fenced, *re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", text, flags=re.S))]
    )


def test_readme_example_runs():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    example = re.search(r"<!-- example: .*? -->\n```python\n(.*?)```", text, re.S).group(1)
    lines = [
        line for line in example.splitlines() if line and not line.startswith(("import", "from"))
    ]
    assert len(lines) <= 10
    names: dict = {}
    exec(compile(example, "README.md", "exec"), names)
    out, layer = names["out"], names["layer"]
    assert out.shape == (300, 256)
    starts = torch.tensor([0, 300], dtype=torch.int32)
    with torch.inference_mode():
        again = layer(names["hidden"], query_start=starts)
    torch.testing.assert_close(out, again)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(document):
    text = document.read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", text):
        if "://" not in target:
            assert (document.parent / target).exists(), f"{document.name}: {target}"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_make_targets_exist(document):
    named = set(re.findall(r"(?:^|[\s`])make ([a-z][a-z-]*)", code_of(document), re.M))
    assert named <= TARGETS, named - TARGETS


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_commands_and_options_exist(document):
    commands = get_command(app).commands
    for line in code_of(document).splitlines():
        shown = re.search(r"(?<!install )flash-qsa ([a-z]+)((?: [^#|>]*)?)", line)
        if not shown or line.lstrip().startswith("pip "):
            continue
        assert shown.group(1) in commands, line
        known = {o for p in commands[shown.group(1)].params for o in p.opts} | {"--help"}
        assert set(re.findall(r"--[a-z-]+", shown.group(2))) <= known, line


def test_results_are_rendered_from_the_files():
    render = script("benchmarks/render.py")
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert readme == render.insert(readme, render.render()), "run `make generated`"


def test_charts_are_drawn_from_the_files():
    render = script("benchmarks/render.py")
    for folder in render.RESULTS.glob("*/"):
        for name, text in render.charts(render.newest_rows(folder)).items():
            assert (folder / name).read_text(encoding="utf-8") == text, "run `make generated`"


def test_charts_follow_the_context():
    render = script("benchmarks/render.py")
    rows = [
        {"op": "select+attend", "workload": f"decode-b8-{name}", "context": context,
         "impl": impl, "median_us": time, "floor_us": 4.0}
        for name, context in (("128k", 131_072), ("8k", 8_192), ("1m", 1 << 20))
        for impl, time in (("flash-qsa triton", 10.0), ("torch dense", context / 512))
    ]  # fmt: skip
    grouped = render.families(rows)
    assert {name: [r["context"] for r in kind] for name, kind in grouped.items()} == {
        "select+attend, decode-b8": [8_192, 131_072, 1 << 20]
    }
    drawn = render.charts(rows)
    assert set(drawn) == {"cost.svg", "floor.svg", "speedup-torch-dense.svg"}
    assert all(text.count("<circle") == 3 for text in drawn.values())
    for label in ("8K", "128K", "1M", "decode-b8"):
        assert label in drawn["cost.svg"]


def test_verify_reports_are_summed_up(tmp_path):
    report = [
        {"device": "Some GPU", "dtype": "float16", "heads": "tp1", "torch": "2", "triton": "3"},
        {"stage": "select", "length": 100, "ok": True},
        {"stage": "attend", "length": 8_193, "ok": False},
        {"failed": 1, "backends that ran": ["triton"], "seconds": 3.0},
    ]
    (tmp_path / "some-gpu").mkdir()
    (tmp_path / "some-gpu" / "verify-1.jsonl").write_text("\n".join(map(json.dumps, report)))
    text = script("benchmarks/render.py").render(tmp_path)
    assert "1 of 2 checks passed on backend triton, up to 8,193 tokens" in text


def test_rendering_keeps_the_newest_row_and_the_losses(tmp_path):
    folder = tmp_path / "some-gpu"
    folder.mkdir()
    common = {"op": "attend", "workload": "w", "floor_us": 5.0, "rows": 1, "context": 8, "batch": 1}
    common |= {"device": "Some GPU", "torch": "2", "triton": "3", "commit": "abc"}
    rows = [
        {**common, "impl": "flash-qsa triton", "median_us": 99.0, "date": "2026-01-01"},
        {**common, "impl": "flash-qsa triton", "median_us": 20.0, "date": "2026-01-02"},
        {**common, "impl": "peer", "median_us": 10.0, "date": "2026-01-02"},
        {"op": "attend", "workload": "w", "impl": "flash-qsa triton", "fault": "off"},
    ]
    (folder / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    text = script("benchmarks/render.py").render(tmp_path)
    assert "| attend | w | 20.0 | 25% | 10.0 (0.50x) |" in text
    assert "99" not in text


def test_picture_is_the_generated_one():
    picture = script("docs/architecture.py")
    assert picture.PICTURE.read_text(encoding="utf-8") == picture.draw(), "run `make generated`"


def test_ci_runs_the_readmes_test_command():
    assert re.search(r"^exec make --keep-going test$", (ROOT / ".ci/run").read_text(), re.M)
    assert "`make test`" in (ROOT / "README.md").read_text(encoding="utf-8")
    assert re.search(r"^test: lint generated unit interpret compile$", MAKEFILE, re.M)


@pytest.fixture
def fake_tree(tmp_path):
    """The Makefile beside an environment whose Python only exits with $STATUS."""
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path / name)
    python = tmp_path / "venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text('#!/bin/sh\ncase "$*" in *pytest*) exit "$STATUS";; esac\n')
    python.chmod(python.stat().st_mode | stat.S_IXUSR)
    for stamp in (".runtime", ".installed"):
        (tmp_path / "venv" / stamp).touch()
    return tmp_path


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
@pytest.mark.parametrize(
    ("status", "passes", "says"), [(0, True, ""), (1, False, ""), (5, False, "collected no test")]
)
@pytest.mark.parametrize("tier", ["unit", "interpret", "compile", "gpu"])
def test_a_tier_that_fails_or_finds_no_test_fails(fake_tree, tier, status, passes, says):
    done = subprocess.run(
        ["make", tier, "VENV=venv"],
        cwd=fake_tree,
        env={**os.environ, "STATUS": str(status), "MAKEFLAGS": ""},
        capture_output=True,
        text=True,
    )
    assert (done.returncode == 0) is passes, done.stdout + done.stderr
    assert says in done.stderr
