"""dispatch: which implementation runs, where, and who decides.

* auto is Triton on a GPU that it supports and the reference everywhere else, with a reason.
* Every device has a backend or a clear message, decided before anything runs; the reference is
  always there.
* An explicit choice runs or raises. FLASH_QSA_BACKEND speaks for auto alone.
* A trace lists what ran, in order; an inner trace hides from an outer one.
"""

from __future__ import annotations

import pytest
import torch

from flash_qsa import dispatch
from flash_qsa.checks import UnsupportedError
from flash_qsa.ops import expand_blocks

CPU = torch.device("cpu")
CUDA = torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch):
    monkeypatch.delenv("FLASH_QSA_BACKEND", raising=False)
    monkeypatch.setenv("TRITON_INTERPRET", "0")


@pytest.fixture
def device_of(monkeypatch):
    """Lets the process believe in a GPU of some capability, or of AMD's."""

    def pretend(capability=None, hip=None, triton=True):
        monkeypatch.setattr(dispatch, "_capability", lambda device: capability)
        monkeypatch.setattr(torch.version, "hip", hip)
        monkeypatch.setattr(dispatch, "triton_installed", lambda: triton)

    return pretend


@pytest.mark.bug("O-45")
@pytest.mark.bug("O-38")
@pytest.mark.parametrize(
    ("capability", "hip", "backend"),
    [
        ((7, 0), None, "reference"),
        ((7, 5), None, "triton"),
        ((8, 0), None, "triton"),
        ((8, 6), None, "triton"),
        ((8, 9), None, "triton"),
        ((9, 0), None, "triton"),
        ((10, 0), None, "triton"),
        ((12, 0), None, "triton"),
        ((12, 1), None, "triton"),
        (None, "6.4", "triton"),
    ],
    ids=str,
)
def test_every_gpu_has_a_backend(device_of, capability, hip, backend):
    device_of(capability, hip)
    choice = dispatch.choose("auto", CUDA)
    assert choice.backend == backend
    assert choice.reason
    assert dispatch.choose("reference", CUDA).backend == "reference"
    if backend == "reference":
        with pytest.raises(UnsupportedError, match=r"7\.0 is below 7\.5"):
            dispatch.choose("triton", CUDA)
    else:
        assert dispatch.choose("triton", CUDA).backend == "triton"


@pytest.mark.bug("O-45")
def test_without_triton_the_reference_runs(device_of):
    device_of((9, 0), triton=False)
    assert dispatch.choose("auto", CUDA) == dispatch.Choice("reference", "triton is not installed")
    with pytest.raises(UnsupportedError, match="triton is not installed"):
        dispatch.choose("triton", CUDA)


def test_cpu_runs_the_reference_and_triton_only_when_interpreted(monkeypatch):
    assert dispatch.choose("auto", CPU).backend == "reference"
    with pytest.raises(UnsupportedError, match="on the CPU"):
        dispatch.choose("triton", CPU)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(dispatch, "triton_installed", lambda: True)
    assert dispatch.choose("triton", CPU).backend == "triton"
    assert dispatch.choose("auto", CPU).backend == "reference"


def test_other_devices_run_the_reference(device_of):
    device_of()
    assert dispatch.choose("auto", torch.device("mps")).backend == "reference"
    with pytest.raises(UnsupportedError, match="mps"):
        dispatch.choose("triton", torch.device("mps"))


def test_the_environment_speaks_for_auto_alone(device_of, monkeypatch):
    device_of((9, 0))
    monkeypatch.setenv("FLASH_QSA_BACKEND", "reference")
    assert dispatch.choose("auto", CUDA).backend == "reference"
    assert "FLASH_QSA_BACKEND" in dispatch.choose("auto", CUDA).reason
    assert dispatch.choose("triton", CUDA).backend == "triton"


def test_an_order_from_the_environment_does_not_fall_back(monkeypatch):
    monkeypatch.setenv("FLASH_QSA_BACKEND", "triton")
    with pytest.raises(UnsupportedError, match="FLASH_QSA_BACKEND"):
        dispatch.choose("auto", CPU)


@pytest.mark.parametrize("name", ["cuda", "", "Triton"])
def test_unknown_backends_are_named(monkeypatch, name):
    with pytest.raises(ValueError, match=f"backend: .*got '{name}'"):
        dispatch.choose(name, CPU)
    monkeypatch.setenv("FLASH_QSA_BACKEND", name)
    with pytest.raises(ValueError, match=f"FLASH_QSA_BACKEND: .*got '{name}'"):
        dispatch.choose("auto", CPU)


def expand():
    rows = torch.zeros(1, dtype=torch.int32)
    return expand_blocks(rows[:, None], rows, rows, 4)


def test_a_trace_lists_what_ran():
    with dispatch.trace() as outer:
        expand()
        with dispatch.trace() as inner:
            expand()
        expand()
    expand()
    assert inner == [("expand_blocks", "reference")]
    assert outer == [("expand_blocks", "reference")] * 2


def test_a_trace_ends_with_an_error():
    with pytest.raises(RuntimeError), dispatch.trace():
        raise RuntimeError
    with dispatch.trace() as ran:
        expand()
    assert len(ran) == 1


@pytest.mark.parametrize("op", dispatch.OPS)
def test_every_op_has_a_reference(op):
    assert callable(dispatch.implementation(op, "reference", CPU))
