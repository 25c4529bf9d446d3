"""Times of interleaved implementations, and what the device could do at best."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import torch

Run = Callable[[], object]

SPIN_MARGIN_US = 200.0
"""Spinning beyond what the calls cost the host: the clock of the device may rise meanwhile."""

MIN_ROUNDS, MAX_SECONDS = 5, 3.0
"""Rounds that are always timed, and the time after which no other one begins."""

GRAPH_ROWS = 512
"""Rows of a step up to which it is timed as a replayed graph, as engines run their decodes."""

MAX_SPIN_US = 50_000.0
"""A turn that the host cannot issue within this waits for the device itself: nothing hides it."""


@dataclass(frozen=True)
class Times:
    """Microseconds of one call: median and the 20th and 80th percentile.

    host_us: median time that issuing one call takes the host, without waiting for the device; None
    where nothing was issued call by call (graph replays, calls on the CPU).
    """

    median_us: float
    p20_us: float
    p80_us: float
    host_us: float | None = None

    @classmethod
    def of(cls, samples: Sequence[float], host: Sequence[float] = ()) -> Times:
        at = torch.tensor(samples, dtype=torch.float64)
        quantiles = at.quantile(torch.tensor([0.5, 0.2, 0.8], dtype=torch.float64))
        issued = round(median(host), 2) if host else None
        return cls(*(round(value, 2) for value in quantiles.tolist()), issued)


def interleaved(
    runs: Mapping[str, Sequence[Run]], device: torch.device, repeats: int, graph: bool
) -> dict[str, Times]:
    """Times every implementation `repeats` times, taking turns, after one warm-up round.

    Every other round is in reverse order, so that none always follows the same one, whose caches
    and clock it finds.
    Slow ones are timed less often: no round begins after MAX_SECONDS, once there are MIN_ROUNDS.

    On a CUDA device events give the time, and the host is not measured: the stream spins until a
    turn is issued, as the queue of a model that runs ahead of its device would make it wait.

    Args:
        runs: implementation → one callable for each copy of the inputs. Rotating through copies
            keeps a small problem from living in the cache of the device.
        graph: on a CUDA device, replay a captured graph of all copies. Callables must then be free
            of host synchronisation.
    """
    timers: dict[str, HostTimer | EagerTimer]
    if device.type != "cuda":
        timers = {name: HostTimer(calls) for name, calls in runs.items()}
    elif graph:
        timers = {name: GraphTimer(calls) for name, calls in runs.items()}
    else:
        timers = {name: EagerTimer(calls) for name, calls in runs.items()}
    samples: dict[str, list[float]] = {name: [] for name in runs}
    for timer in timers.values():
        timer.turn()
    for timer in timers.values():
        timer.host.clear()
    began = time.perf_counter()
    for turn in range(repeats):
        if turn >= MIN_ROUNDS and time.perf_counter() - began > MAX_SECONDS:
            break
        for name in list(timers)[:: -1 if turn % 2 else 1]:
            samples[name].append(timers[name].turn())
    return {name: Times.of(values, timers[name].host) for name, values in samples.items()}


class HostTimer:
    """Calls that are over when they return: the clock of the host times a turn."""

    def __init__(self, calls: Sequence[Run]) -> None:
        self.calls = calls
        self.host: list[float] = []

    def turn(self) -> float:
        """Microseconds of one call."""
        return _issue(self.calls)


class EagerTimer:
    """Calls issued one by one behind a spin of the device, so that it never waits for the host.

    host: microseconds of the host for one call of each turn.
    """

    def __init__(self, calls: Sequence[Run]) -> None:
        self.calls = calls
        self.host: list[float] = []
        _issue(calls)  # compiles
        torch.cuda.synchronize()
        self.spin_us = 1.5 * _issue(calls) * len(calls) + SPIN_MARGIN_US
        torch.cuda.synchronize()
        self.cycles_per_us = _cycles_per_us()

    def turn(self) -> float:
        """Microseconds of one call; repeated with a longer spin while the host falls behind."""
        while True:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda._sleep(int(self.spin_us * self.cycles_per_us))
            start.record()
            host = _issue(self.calls)
            end.record()
            ahead = not start.query()
            end.synchronize()
            if ahead or self.spin_us >= MAX_SPIN_US:
                self.host.append(host)
                return start.elapsed_time(end) * 1e3 / len(self.calls)
            self.spin_us = min(2 * self.spin_us, MAX_SPIN_US)


class GraphTimer(EagerTimer):
    """One captured graph of all calls, whose replay is issued behind a spin as a call would be."""

    def __init__(self, calls: Sequence[Run]) -> None:
        self.count = len(calls)
        super().__init__([_captured(calls)])

    def turn(self) -> float:
        """Microseconds of one call."""
        micros = super().turn() / self.count
        self.host.clear()  # calls are not issued one by one
        return micros


def _issue(calls: Sequence[Run]) -> float:
    """Makes every call once; microseconds of the host for one."""
    began = time.perf_counter()
    for call in calls:
        call()
    return (time.perf_counter() - began) * 1e6 / len(calls)


def _cycles_per_us() -> float:
    """Cycles of `torch.cuda._sleep` in a microsecond, at the clock that the device runs at now."""
    cycles = 4_000_000
    for _ in range(2):  # the first warms up
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        torch.cuda._sleep(cycles)
        end.record()
        end.synchronize()
    return cycles / (start.elapsed_time(end) * 1e3)


def _captured(calls: Sequence[Run]) -> Run:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for call in calls:  # compiles kernels, which capture forbids
            call()
    torch.cuda.current_stream().wait_stream(side)
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        kept = [call() for call in calls]
    return lambda: (captured.replay(), kept)[0]


@dataclass(frozen=True)
class Rates:
    """What this device reached in this run: bytes moved and operations per microsecond."""

    bytes_per_us: float
    flops_per_us: float

    def floor_us(self, moved: float, flops: float) -> float:
        """The shortest time in which that many bytes and operations can be done, overlapped."""
        return round(max(moved / self.bytes_per_us, flops / self.flops_per_us), 3)


def device_rates(device: torch.device, dtype: torch.dtype) -> Rates:
    """Measures a large copy and a large matrix product."""
    on_gpu = device.type == "cuda"
    source = torch.empty((1 << 30) if on_gpu else (64 << 20), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    size = 8192 if on_gpu else 1024
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    runs = {"copy": [lambda: target.copy_(source)], "product": [lambda: a @ b]}
    times = interleaved(runs, device, 10 if on_gpu else 3, graph=False)
    return Rates(2 * source.numel() / times["copy"].p20_us, 2 * size**3 / times["product"].p20_us)
