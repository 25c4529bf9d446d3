"""Eager calls are timed on the device alone, and what issuing them costs the host stands apart.

A device and a clock that tests can foretell: work takes as long as it says, in order, and only
after it has been issued; issuing moves the clock of the host.
"""

from __future__ import annotations

import pytest
import torch

from flash_qsa.testing.measure import timing

CUDA = torch.device("cuda")
CYCLES_PER_US = 1500.0


class Device:
    """now: the host's clock; free: when the device has done all that was issued (µs)."""

    def __init__(self) -> None:
        self.now = self.free = 0.0
        self.spins: list[float] = []
        self.cycles_per_us = CYCLES_PER_US

    def work(self, micros: float) -> None:
        self.free = max(self.free, self.now) + micros

    def sleep(self, cycles: int) -> None:
        self.spins.append(cycles / self.cycles_per_us)
        self.work(self.spins[-1])

    def synchronize(self) -> None:
        self.now = max(self.now, self.free)

    def call(self, host: float, device: float):
        def run() -> None:
            self.now += host
            self.work(device)

        return run

    def event(self, enable_timing: bool):
        return Event(self)


class Event:
    def __init__(self, device: Device) -> None:
        self.device = device

    def record(self) -> None:
        self.at = max(self.device.free, self.device.now)

    def query(self) -> bool:
        return self.at <= self.device.now

    def synchronize(self) -> None:
        self.device.now = max(self.device.now, self.at)

    def elapsed_time(self, end: Event) -> float:
        return (end.at - self.at) / 1e3


@pytest.fixture
def device(monkeypatch) -> Device:
    fake = Device()
    monkeypatch.setattr(torch.cuda, "Event", fake.event)
    monkeypatch.setattr(torch.cuda, "_sleep", fake.sleep)
    monkeypatch.setattr(torch.cuda, "synchronize", fake.synchronize)
    monkeypatch.setattr(timing.time, "perf_counter", lambda: fake.now / 1e6)
    return fake


def test_host_bound_calls_are_timed_by_the_device(device):
    runs = {"ours": [device.call(235.0, 14.0)] * 3, "peer": [device.call(90.0, 31.0)] * 3}
    times = timing.interleaved(runs, CUDA, 5, graph=False)
    assert times["ours"] == timing.Times(14.0, 14.0, 14.0, 235.0)
    assert times["peer"] == timing.Times(31.0, 31.0, 31.0, 90.0)
    wanted = [1.5 * 3 * host + timing.SPIN_MARGIN_US for host in (235.0, 90.0)]
    assert device.spins[-2:] == pytest.approx(wanted, rel=1e-3)


def test_a_spin_that_was_too_short_is_repeated_longer(device):
    timer = timing.EagerTimer([device.call(100.0, 1.0)] * 4)
    device.cycles_per_us = 4 * CYCLES_PER_US  # the clock of the device rises
    assert timer.turn() == pytest.approx(1.0)
    assert timer.host == pytest.approx([100.0])
    assert device.spins[-1] > 400.0 > device.spins[-2]


def test_calls_that_wait_for_the_device_are_timed_all_the_same(device):
    def waiting() -> None:
        device.work(50.0)
        device.synchronize()

    assert timing.EagerTimer([waiting]).turn() == pytest.approx(50.0)


def test_what_launching_a_graph_costs_the_host_is_not_counted(device, monkeypatch):
    calls = [device.call(300.0, 10.0)] * 4

    def captured(calls):
        return device.call(25.0, 40.0)

    monkeypatch.setattr(timing, "_captured", captured)
    times = timing.interleaved({"a": calls}, CUDA, 3, graph=True)
    assert times["a"] == timing.Times(10.0, 10.0, 10.0, None)


def test_cpu_calls_cost_no_host_time_apart(device):
    times = timing.interleaved({"a": [device.call(7.0, 0.0)]}, torch.device("cpu"), 2, graph=True)
    assert times["a"] == timing.Times(7.0, 7.0, 7.0, None)


@pytest.mark.parametrize("slow, rounds", [(1e3, 20), (4e5, 8), (2e6, timing.MIN_ROUNDS)])
def test_slow_calls_are_timed_in_fewer_rounds(device, slow, rounds):
    turns = []

    def call() -> None:
        turns.append(device.now)
        device.now += slow

    timing.interleaved({"a": [call]}, torch.device("cpu"), 20, graph=False)
    assert len(turns) == 1 + rounds  # and the warm-up
