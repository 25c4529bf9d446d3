"""The list of promises and the tests agree.

* Every promised line has a test that names it.
* A line that a CPU can show is not left to the GPU tier alone.
* No test names a line that does not exist.
* tests/parity.md says what the tests say.
"""

from __future__ import annotations

import pytest
from parity_table import GPU, TABLE, coverage, marked_ids, render
from promises import BUGS, PARITY

COVERED = coverage()
LINES = [("parity", name, promise) for name, promise in PARITY.items()]
LINES += [("bug", name, promise) for name, promise in BUGS.items()]


@pytest.mark.parametrize(("marker", "name", "promise"), LINES, ids=[name for _, name, _ in LINES])
def test_every_line_has_a_test(marker, name, promise):
    files = COVERED[marker].get(name, [])
    assert files, f"no test is marked {marker}({name!r}): {promise.text}"
    if not promise.needs_gpu:
        assert any(not file.startswith(GPU) for file in files), f"{name} is tested on a GPU alone"


def test_no_test_names_an_unknown_line():
    unknown = set(COVERED["parity"]) - set(PARITY) | set(COVERED["bug"]) - set(BUGS)
    assert not unknown


def test_the_table_is_the_generated_one():
    assert TABLE.read_text(encoding="utf-8") == render(), "run `make generated`"


def test_markers_are_found_wherever_pytest_takes_them():
    source = """
pytestmark = pytest.mark.bug("O-01")
@pytest.mark.parity("P01", "P02")
@pytest.mark.parametrize("x", [pytest.param(1, marks=pytest.mark.bug("O-02"))])
def test_a(x): ...
other.parity("P99")
"""
    assert set(marked_ids(source)) == {
        ("bug", "O-01"),
        ("bug", "O-02"),
        ("parity", "P01"),
        ("parity", "P02"),
    }
