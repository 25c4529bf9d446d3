"""flash-qsa bench: workloads by name, gate before time, one JSON object with all fields a line.

* Every result has exactly the documented fields; ours and the peer run on the same problem.
* A wrong backend is not timed: its line holds the fault, and the exit code is 1.
* Floors count what must move: keys once a request, each selected token once, scores only where
  more blocks are visible than selected.
"""

from __future__ import annotations

import json

import pytest
import torch
from typer.testing import CliRunner

from flash_qsa import dispatch
from flash_qsa.cli import bench
from flash_qsa.cli.main import app
from flash_qsa.testing.inputs import Shape
from flash_qsa.testing.measure.cases import cost, select
from flash_qsa.testing.measure.problem import workload_problem
from flash_qsa.testing.measure.timing import Rates, Times, interleaved
from flash_qsa.testing.workloads import WORKLOADS, Workload

runner = CliRunner()
CPU = torch.device("cpu")
SMALL = Workload("small", 2, 3, 101, 0.9, Shape())
ALL = ["select", "attend", "select+attend", "prepare"]


@pytest.fixture
def fixed_rates(monkeypatch):
    from flash_qsa.testing.measure import timing

    monkeypatch.setattr(timing, "device_rates", lambda device, dtype: Rates(1000.0, 1000.0))


def measure(workload=SMALL, ops=ALL):
    return list(bench.results([workload], ops, CPU, torch.float32, "reference", 2))


def test_every_line_has_every_field(fixed_rates):
    rows = measure()
    assert [set(row) for row in rows] == [set(bench.FIELDS)] * 6
    assert [(row["op"], row["impl"]) for row in rows] == [
        ("select", "flash-qsa reference"),
        ("attend", "flash-qsa reference"),
        ("attend", "torch dense"),
        ("select+attend", "flash-qsa reference"),
        ("select+attend", "torch dense"),
        ("prepare", "flash-qsa reference"),
    ]
    assert all(row["p20_us"] <= row["median_us"] <= row["p80_us"] for row in rows)
    assert {(row["rows"], row["batch"], row["context"]) for row in rows} == {(6, 2, 101)}
    assert {row["host_us"] for row in rows} == {None}  # nothing apart from the time itself


def test_an_fp8_index_is_gated_and_costs_half_the_key_bytes(fixed_rates):
    workload = Workload("fp8", 1, 1, 400, 0.0, Shape(), fp8_index=True)
    rows = measure(workload, ["select", "select+attend", "prepare"])
    assert not any("fault" in row for row in rows)
    problem = workload_problem(workload, torch.bfloat16, CPU)
    half = workload_problem(Workload("bf16", 1, 1, 400, 0.0, Shape()), torch.bfloat16, CPU)
    ids = torch.empty(1, 0)
    keys = [cost("select", p, ids).moved - 4 * Shape().top_k for p in (problem, half)]
    assert keys[0] * 2 == keys[1]


def test_a_wrong_backend_is_not_timed(fixed_rates, monkeypatch):
    genuine = dispatch.implementation

    def implementation(op, backend, device):
        run = genuine(op, backend, device)
        if op != "sparse_attention":
            return run
        return lambda *arguments: (run(*arguments), arguments[-2].mul_(1.001))

    monkeypatch.setattr(dispatch, "implementation", implementation)
    rows = measure(ops=["attend"])
    assert len(rows) == 1
    assert "times its bound" in rows[0]["fault"]
    assert "median_us" not in rows[0]


def test_command_appends_json_lines(fixed_rates, monkeypatch, tmp_path):
    monkeypatch.setitem(WORKLOADS, "small", SMALL)
    out = tmp_path / "results" / "today.jsonl"
    options = ["--workloads", "small", "--repeats", "1", "--device", "cpu", "--ops", "select"]
    for _ in range(2):
        done = runner.invoke(app, ["bench", *options, "--out", str(out)])
        assert done.exit_code == 0, done.output
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["workload"] for row in rows] == ["small", "small"]


@pytest.mark.parametrize("options", [["--workloads", "nothing"], ["--ops", "select,swim"]])
def test_unknown_names_are_refused(options):
    done = runner.invoke(app, ["bench", "--device", "cpu", *options])
    assert done.exit_code == 2
    assert options[1].split(",")[-1] in done.output


def test_list_names_every_workload():
    assert runner.invoke(app, ["bench", "--list"]).output.split() == list(WORKLOADS)


def test_names_say_what_a_workload_is():
    for name, workload in WORKLOADS.items():
        assert name == workload.name
        if "corr" in name:
            assert workload.overlap == float(name.rsplit("corr", 1)[1])
        assert ("verify4" in name) == (workload.rows == 4)
        ranks = int(name[2]) if name.startswith("tp") else 1
        shape = workload.shape
        assert (shape.heads, shape.kv_heads) == (24 // ranks, max(2 // ranks, 1))
        assert shape.index_heads == 4


def test_floor_of_selection_skips_rows_that_take_everything():
    shape = Shape()
    few = workload_problem(Workload("few", 1, 2, 18, 0.0, shape), torch.float32, CPU)
    assert cost("select", few, select(few, "reference")).flops == 0
    many = workload_problem(Workload("many", 1, 1, 400, 0.0, shape), torch.float32, CPU)
    seen = cost("select", many, select(many, "reference"))
    assert seen.flops == 2 * shape.index_heads * shape.index_dim * 100
    assert seen.moved == 100 * shape.index_dim * 4 + (2 * 16 * 4 + 4 * shape.top_k)


def test_floor_of_attention_counts_a_shared_block_once():
    shape = Shape()
    problem = workload_problem(Workload("rows", 1, 2, 400, 0.0, shape), torch.float32, CPU)
    ids = torch.tensor([[3, 7, -1, -1], [3, 9, -1, -1]], dtype=torch.int32)
    seen = cost("attend", problem, ids)
    rows = 3 * problem.query.numel() * 4
    assert seen.moved == 3 * shape.ratio * 2 * shape.kv_heads * shape.head_dim * 4 + rows
    assert seen.flops == 4 * shape.heads * shape.head_dim * 4 * shape.ratio


def test_neighbouring_rows_have_the_named_correlation():
    shape = Shape(index_heads=4, index_dim=64)
    problem = workload_problem(Workload("c", 1, 400, 400, 0.9, shape), torch.float32, CPU)
    rows = problem.index_query.flatten(1)
    seen = torch.corrcoef(torch.stack((rows[:-1].flatten(), rows[1:].flatten())))[0, 1]
    assert abs(float(seen) - 0.9) < 0.02
    assert abs(float(rows.std()) - 1) < 0.05


def test_floor_of_preparation_reads_and_writes_each_row_once():
    shape = Shape()
    problem = workload_problem(Workload("p", 1, 2, 400, 0.0, shape), torch.float32, CPU)
    width = (shape.heads + shape.kv_heads) * 2 * shape.head_dim
    width += (shape.index_heads + 1) * shape.index_dim
    assert cost("prepare", problem, torch.empty(2, 4)).moved == 2 * 2 * width * 4


def test_dense_attention_is_that_of_every_token():
    """The peer is the oracle of the same rows: whole context, gate included."""
    from flash_qsa.ops.dense_attention import dense_attention
    from flash_qsa.testing.measure.cases import dense

    for workload in (SMALL, Workload("one", 2, 1, 37, 0.0, Shape())):
        problem = workload_problem(workload, torch.float32, CPU)
        plan = problem.plan
        seen = dense(problem, torch.empty(0))().transpose(1, 2).flatten(0, 1)
        truth = dense_attention(
            problem.query,
            problem.kv_cache,
            plan.positions,
            plan.page_table,
            plan.request_ids,
            gate=problem.gate,
        )
        torch.testing.assert_close(seen, truth, rtol=1e-4, atol=1e-5)


def test_implementations_take_turns():
    order = []
    runs = {name: [lambda name=name: order.append(name)] for name in ("a", "b")}
    times = interleaved(runs, CPU, 3, graph=False)
    assert "".join(order) == "ab" + "ab" + "ba" + "ab"
    assert set(times) == {"a", "b"}


def test_percentiles():
    assert Times.of([5.0, 1.0, 2.0, 3.0, 4.0, 6.0]) == Times(3.5, 2.0, 5.0)


def test_result_folders_are_plain_names():
    assert bench.device_folder("NVIDIA H200 (141GB)") == "nvidia-h200-141gb"
