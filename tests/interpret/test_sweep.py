"""benchmarks/kernels/sweep.py: settings reach the schedules they name, wrong answers are found."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
import torch

from flash_qsa.ops.sparse_attention.kernel import Tuning
from flash_qsa.testing.inputs import Shape, make_problem
from flash_qsa.testing.measure.cases import select

PATH = Path(__file__).resolve().parents[2] / "benchmarks" / "kernels" / "sweep.py"
SETTINGS = {"rows.block_n": 16, "rows.splits": 3, "share": False, "score.splits": 2}


@pytest.fixture(scope="module")
def sweep():
    spec = importlib.util.spec_from_file_location("sweep", PATH)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def problem():
    return make_problem([900, 300], [1, 1], Shape(head_dim=64), dtype=torch.float16)


def test_every_combination_of_the_named_settings(sweep):
    found = list(sweep.combinations(["rows.block_n=16,32", "share=true,false", "selector=cuda"]))
    assert len(found) == 4
    assert found[1] == {"rows.block_n": 16, "share": False, "selector": "cuda"}
    assert sweep.tunings(SETTINGS | {"dense": None}) == (
        Tuning(rows={"block_n": 16, "splits": 3}, share=False),
        {"score": {"splits": 2}, "dense": None},
    )


@pytest.mark.parametrize("word", ["rows.block_n", "row.block_n=16", "=3"])
def test_a_word_that_sets_nothing_is_refused(sweep, word):
    with pytest.raises(ValueError, match=r"expected NAME=VALUE,\.\.\. with a name of admit_next"):
        list(sweep.combinations([word]))


def test_settings_reach_both_ops_and_answers_are_checked(sweep, problem):
    ids = select(problem, "triton")
    assert sweep.faults("select+attend", problem, ids, SETTINGS) == []
    assert sweep.faults("select", problem, ids.flip(0), {}) == ["other ids"]
    spoiled = sweep.calls("attend", problem, ids, {})
    problem.gate.neg_()
    out = spoiled()
    problem.gate.neg_()
    (fault,) = sweep.attention_faults(problem, ids, out)
    assert "times its bound" in fault
