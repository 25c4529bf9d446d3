"""Self-check of a backend on a device: each stage of QSA against float64, at long contexts.

A stage builds a hostile problem of the wanted length, runs public ops through the backend, and
compares all they wrote with a float64 truth under a derived bound, or bit for bit where nothing is
rounded. A few query rows are enough: what goes wrong at a length goes wrong in every row.

Truth is computed here from the definitions in DESIGN.md and shares no code with the references.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from flash_qsa import dispatch
from flash_qsa.testing.selfcheck import attention, preparation, selection
from flash_qsa.testing.selfcheck.problem import Cases, Problems, Setting

__all__ = ["LENGTHS", "LONG_LENGTHS", "STAGES", "Setting", "StageResult", "run_stages"]

LENGTHS = (100, 2_052, 8_193, 32_768)
LONG_LENGTHS = (131_072, 262_144)

STAGES: dict[str, Callable[[Problems], Cases]] = {
    "plan": preparation.plan,
    "norm": preparation.norm,
    "rope": preparation.rope,
    "compress": preparation.compress,
    "store": preparation.store,
    "prepare": preparation.prepare,
    "select": selection.select,
    "ties": selection.ties,
    "expand": selection.expand,
    "attend": attention.attend,
    "gate": attention.gate,
    "dense": attention.dense,
    "repeat": attention.repeat,
}


@dataclass(frozen=True)
class StageResult:
    """One compared case.

    error and bound belong to the element that uses most of its bound; where equality is required
    the bound is 0 and the error counts faults. ran names the backends that really ran. detail says
    what is wrong and is empty where nothing is.
    """

    stage: str
    case: str
    length: int
    error: float
    bound: float
    ran: tuple[str, ...]
    detail: str = ""

    @property
    def ok(self) -> bool:
        return not self.detail


def run_stages(
    setting: Setting, length: int, stages: Sequence[str] = tuple(STAGES)
) -> Iterator[StageResult]:
    """Runs the named stages at one context length, in the order of STAGES.

    An exception inside a case is that case's failure, so the rest still reports.
    """
    problems = Problems(setting, length)
    for stage, cases in STAGES.items():
        if stage not in stages:
            continue
        for case, check in cases(problems):
            with dispatch.trace() as ran:
                try:
                    error, bound, detail = check()
                except Exception as failure:
                    error, bound = float("nan"), 0.0
                    detail = f"{type(failure).__name__}: {failure}"
            backends = tuple(sorted({backend for _, backend in ran}))
            yield StageResult(stage, case, length, error, bound, backends, detail)
