"""Times of interleaved implementations, and what the device could do at best."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

Run = Callable[[], object]


@dataclass(frozen=True)
class Times:
    """Microseconds of one call: median and the 20th and 80th percentile."""

    median_us: float
    p20_us: float
    p80_us: float

    @classmethod
    def of(cls, samples: Sequence[float]) -> Times:
        at = torch.tensor(samples, dtype=torch.float64)
        quantiles = at.quantile(torch.tensor([0.5, 0.2, 0.8], dtype=torch.float64))
        return cls(*(round(value, 2) for value in quantiles.tolist()))


def interleaved(
    runs: Mapping[str, Sequence[Run]], device: torch.device, repeats: int, graph: bool
) -> dict[str, Times]:
    """Times every implementation `repeats` times, taking turns, after one warm-up round.

    Args:
        runs: implementation → one callable for each copy of the inputs. Rotating through copies
            keeps a small problem from living in the cache of the device.
        graph: on a CUDA device, replay a captured graph of all copies: no launch overhead of the
            host is measured. Callables must then be free of host synchronisation.
    """
    if device.type != "cuda":
        timers = {name: _host_timer(calls) for name, calls in runs.items()}
    elif graph:
        timers = {
            name: _device_timer([_captured(calls)], len(calls)) for name, calls in runs.items()
        }
    else:
        timers = {name: _device_timer(calls, len(calls)) for name, calls in runs.items()}
    samples: dict[str, list[float]] = {name: [] for name in runs}
    for timer in timers.values():
        timer()
    for _ in range(repeats):
        for name, timer in timers.items():
            samples[name].append(timer())
    return {name: Times.of(values) for name, values in samples.items()}


def _host_timer(calls: Sequence[Run]) -> Callable[[], float]:
    def timer() -> float:
        began = time.perf_counter()
        for call in calls:
            call()
        return (time.perf_counter() - began) * 1e6 / len(calls)

    return timer


def _device_timer(calls: Sequence[Run], count: int) -> Callable[[], float]:
    def timer() -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for call in calls:
            call()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) * 1e3 / count

    return timer


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
