"""The benchmark against stock transformers times nothing that is wrong, and records what it times.

* Equal layers are recorded with the fields of `flash-qsa bench`, both sides under their names.
* A block that goes missing from one row stops the benchmark, and so does attention that is off or a
  last projection that differs.
"""

from __future__ import annotations

import functools
import importlib.util
import json
from pathlib import Path

import pytest
import torch

from flash_qsa.cli.bench import FIELDS
from flash_qsa.integrations.transformers import attention

pytestmark = pytest.mark.hf
SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "layer.py"
SMALL = ["--tokens", "300", "--hidden", "64", "--budget", "128", "--repeats", "1"]


@pytest.fixture(scope="module")
def layer():
    spec = importlib.util.spec_from_file_location("layer", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_both_sides_are_recorded(layer, monkeypatch, tmp_path, dtype):
    monkeypatch.setitem(layer.DTYPES, "cpu", dtype)
    out = tmp_path / "rows.jsonl"
    layer.main([*SMALL, "--out", str(out)])
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert all(set(row) == set(FIELDS) for row in rows)
    assert [row["impl"] for row in rows] == ["flash-qsa", "transformers stock"]
    assert {(row["op"], row["workload"]) for row in rows} == {("layer", "transformers-layer-300")}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("broken", "says"),
    [("select_blocks", "1 rows select otherwise"), ("sparse_attention", "times its bound")],
)
def test_what_is_wrong_is_not_timed(layer, monkeypatch, tmp_path, dtype, broken, says):
    genuine = getattr(attention, broken)

    # the benchmark binds the arguments by name
    @functools.wraps(genuine)
    def spoiled(*args, **kwargs):
        out = genuine(*args, **kwargs)
        if broken == "select_blocks":
            out[250, 5] = -1
        else:
            out[-1, 0] *= 1.05
        return out

    monkeypatch.setitem(layer.DTYPES, "cpu", dtype)
    monkeypatch.setattr(attention, broken, spoiled)
    with pytest.raises(SystemExit, match=says):
        layer.main([*SMALL, "--out", str(tmp_path / "rows.jsonl")])
    assert not (tmp_path / "rows.jsonl").exists()


def test_rows_may_select_otherwise_at_near_ties_alone(layer):
    stock, near = torch.eye(3).bool(), torch.tensor([False, True, False])
    ours = stock.clone()
    ours[1, 0] = True
    assert layer.differing_rows(ours, stock, near) == 1
    ours[2, 0] = True
    with pytest.raises(SystemExit, match="1 rows select otherwise"):
        layer.differing_rows(ours, stock, near)


def test_outputs_differ_where_selections_do_and_nowhere_else(layer):
    stock = torch.ones(3, 4)
    ours = stock.clone()
    ours[1, 2] = float("nan")
    layer.compared_outputs(ours, stock, 1)
    with pytest.raises(SystemExit, match="differ in 1 rows"):
        layer.compared_outputs(ours, stock, 0)


def test_cuts_are_near_when_rounding_decides(layer):
    scores = torch.tensor([3.0, 1.0, 1.0 + 1e-6, 2.0])
    with layer.watched_cuts() as near:
        assert scores.topk(3).indices.tolist() == [0, 3, 2]  # 1 + 1e-6 is in, 1 is out
        scores.topk(2)
        torch.tensor([3.0, 1.0, 1.0]).topk(2)  # an exact tie: the lower id, on both sides
        scores.topk(4)  # nothing is cut
    assert [bool(one) for one in near] == [True, False, False, False]
