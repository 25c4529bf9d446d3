"""flash-qsa verify and the stages behind it.

* A correct backend passes every stage, in every dtype, and the report says which backend ran.
* Planted faults fail: a dropped block, a leak of the future, NaN from unused memory, ties broken
  the wrong way, a missing block in the plan, a gate left out, K and V swapped, a neighbouring
  cell overwritten, a rotation by the wrong position.
* An exception in one stage is a failure of that stage alone.
* A failure gives a non-zero exit code.
"""

from __future__ import annotations

import importlib
import json

import pytest
import torch
from typer.testing import CliRunner

from flash_qsa import dispatch
from flash_qsa.cli.main import app
from flash_qsa.testing.inputs import Shape
from flash_qsa.testing.selfcheck import STAGES, Setting, run_stages

runner = CliRunner()
SETTING = Setting(torch.device("cpu"), backend="reference", shape=Shape())


def failures(stages=tuple(STAGES), length=203):
    return {r.stage: r.detail for r in run_stages(SETTING, length, stages) if not r.ok}


def plant(monkeypatch, op, change):
    """Lets `change(run, *arguments)` stand for the implementation of `op`."""
    genuine = dispatch.implementation

    def implementation(name, backend, device):
        run = genuine(name, backend, device)
        return (lambda *arguments: change(run, *arguments)) if name == op else run

    monkeypatch.setattr(dispatch, "implementation", implementation)


@pytest.mark.bug("O-38")
@pytest.mark.parametrize(
    ("dtype", "length"),
    [
        (torch.float32, 1),
        (torch.float32, 3),
        (torch.float32, 20),
        (torch.float32, 203),
        (torch.float16, 203),
        (torch.bfloat16, 203),
    ],
    ids=lambda value: str(value).removeprefix("torch."),
)
def test_the_reference_passes_every_stage(dtype, length):
    setting = Setting(torch.device("cpu"), backend="reference", shape=Shape(), dtype=dtype)
    results = list(run_stages(setting, length))
    assert [r for r in results if not r.ok] == []
    assert {r.stage for r in results} >= set(STAGES) - {"ties"}
    assert {r.ran for r in results if r.case != "table"} == {("reference",)}


def test_a_dropped_block_fails_selection_and_attention(monkeypatch):
    def change(run, *arguments):
        run(*arguments)
        arguments[-1][:, 0] = -1

    plant(monkeypatch, "select_blocks", change)
    assert set(failures(("select", "ties", "dense"))) == {"select", "ties", "dense"}


def test_attention_that_loses_one_block_fails(monkeypatch):
    def change(run, *arguments):
        ids = arguments[3].clone()
        ids[:, 1] = -1
        run(*arguments[:3], ids, *arguments[4:])

    plant(monkeypatch, "sparse_attention", change)
    assert set(failures(("attend", "gate"))) == {"attend", "gate"}


def test_attention_to_the_future_fails(monkeypatch):
    def change(run, *arguments):
        positions = arguments[4]
        tail = torch.where(positions >= 0, (positions + 1) // 4 * 4 + 4, 0)
        run(
            *arguments[:4],
            positions.where(positions < 0, positions + 1),
            *arguments[5:12],
            tail,
            *arguments[13:],
        )

    plant(monkeypatch, "sparse_attention", change)
    assert set(failures(("attend", "gate"), 202)) == {"attend", "gate"}


def test_a_leak_of_the_future_fails(monkeypatch):
    def change(run, *arguments):
        visible = arguments[4]
        run(*arguments[:4], torch.where(visible > 0, visible + 1, visible), *arguments[5:])

    plant(monkeypatch, "select_blocks", change)
    assert set(failures(("ties",))) == {"ties"}


def test_nan_fails(monkeypatch):
    def change(run, *arguments):
        run(*arguments)
        arguments[-2][0, 0, 0] = float("nan")

    plant(monkeypatch, "sparse_attention", change)
    assert set(failures(("attend", "gate", "dense"))) == {"attend", "gate", "dense"}


@pytest.mark.parametrize("leak", [True, False])
def test_nan_that_reaches_other_rows_or_none_fails(monkeypatch, leak):
    def change(run, *arguments):
        run(*arguments)
        out = arguments[-2]
        if leak and out.isnan().any():
            out.fill_(torch.nan)
        else:
            out.nan_to_num_()

    plant(monkeypatch, "sparse_attention", change)
    assert set(failures(("attend", "gate", "dense"))) == {"attend"}


def test_ties_broken_upwards_fail_only_where_scores_tie(monkeypatch):
    reference = importlib.import_module("flash_qsa.ops.select_blocks.reference")

    def higher_first(scores):
        bits = torch.where(scores.isnan(), -1, (scores + 0.0).view(torch.int32).long())
        return (bits << 32) | torch.arange(scores.shape[-1])

    monkeypatch.setattr(reference, "rank_keys", higher_first)
    assert set(failures(("select", "ties"))) == {"ties"}


@pytest.mark.parametrize(
    ("op", "change", "caught"),
    [
        (
            "batch_plan",
            lambda run, *a: (run(*a), a[-1].compressed_slots.fill_(-1)),
            {"plan"},
        ),
        (
            "sparse_attention",
            lambda run, *a: run(*a[:9], None, *a[10:]),
            {"gate", "dense"},
        ),
        (
            "sparse_attention",
            lambda run, *a: run(a[0], a[2], a[1], *a[3:]),
            {"attend", "gate", "dense"},
        ),
        (
            "store_rows",
            lambda run, *a: (run(*a), a[0][0, 1].zero_()),
            {"store"},
        ),
        (
            "compress_keys",
            lambda run, *a: (run(*a), a[-2].mul_(1.01)),
            {"compress"},
        ),
        (
            "prepare",
            lambda run, *a: run(a[0], a[1], a[2] + 1, *a[3:]),
            {"rope", "prepare"},
        ),
        (
            "prepare",
            lambda run, *a: (run(*a), a[5].main[-1].zero_()),
            {"prepare"},
        ),
        (
            "expand_blocks",
            lambda run, *a: (run(*a), a[-1][:, -1].add_(1)),
            {"expand"},
        ),
    ],
    ids=[
        "plan without compressed slots",
        "gate left out",
        "K and V swapped",
        "neighbouring cell overwritten",
        "mean off by a percent",
        "rotated one position on",
        "main cache page wiped",
        "count off by one",
    ],
)
def test_other_faults_fail_in_their_stage(monkeypatch, op, change, caught):
    plant(monkeypatch, op, change)
    assert set(failures(tuple(caught))) == caught


def test_answers_that_change_from_call_to_call_fail(monkeypatch):
    calls = []

    def change(run, *arguments):
        run(*arguments)
        calls.append(1)
        arguments[-2].mul_(1 + 2.0**-22 * len(calls))

    plant(monkeypatch, "sparse_attention", change)
    assert set(failures(("repeat",))) == {"repeat"}


def test_an_exception_is_the_failure_of_its_own_stage(monkeypatch):
    def change(run, *arguments):
        raise RuntimeError("no such kernel")

    plant(monkeypatch, "expand_blocks", change)
    assert failures() == {"expand": "RuntimeError: no such kernel"}


def test_command_reports_and_exits_zero_when_all_pass():
    done = runner.invoke(app, ["verify", "--heads", "small", "--lengths", "50", "--device", "cpu"])
    assert done.exit_code == 0, done.output
    assert "checks passed on backend reference" in done.output


def test_command_exits_non_zero_and_names_the_fault(monkeypatch):
    plant(monkeypatch, "expand_blocks", lambda run, *a: (run(*a), a[-1].add_(1)))
    options = ["--heads", "small", "--lengths", "50", "--device", "cpu", "--json"]
    done = runner.invoke(app, ["verify", *options])
    assert done.exit_code == 1
    rows = [json.loads(line) for line in done.output.splitlines()]
    assert [row["stage"] for row in rows if row.get("ok") is False] == ["expand"]
    assert rows[-1]["failed"] == 1


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--lengths", "many"], "lengths"),
        (["--lengths", "0"], "lengths"),
        (["--stages", "select,nothing"], "nothing"),
        (["--heads", "tp3"], "heads"),
        (["--dtype", "int8"], "dtype"),
        (["--device", "quantum"], "device"),
    ],
)
def test_command_refuses_what_it_does_not_know(options, named):
    done = runner.invoke(app, ["verify", *options])
    assert done.exit_code == 2
    assert named in done.output


def test_an_explicit_backend_that_cannot_run_is_not_replaced(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    options = ["--heads", "small", "--lengths", "20", "--device", "cpu", "--backend", "triton"]
    done = runner.invoke(app, ["verify", *options])
    assert done.exit_code == 1
    assert "on backend none" in done.output
