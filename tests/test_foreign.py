"""The runner of other people's tests: it sees an outcome that changes, says why, and asks of each incident whether it is a true one."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).with_name("foreign")))

import page
import run
from suites import Suite

SUITE = """
import os, torch, weakref, gc, pytest
from torch.utils._python_dispatch import _get_current_dispatch_mode

def test_trains():
    weight = torch.ones(3, requires_grad=True)
    (weight * 2).sum().backward()
    assert weight.grad.sum() == 6

def test_is_alone():
    assert _get_current_dispatch_mode() is None

def test_lets_go():
    made = torch.ones(3, requires_grad=True) * 2
    gone = weakref.ref(made)
    del made
    gc.collect()
    assert gone() is None

def test_divides():
    weight = torch.zeros(3, requires_grad=True)
    (1 / weight).sum().backward()

def test_fails():
    raise ValueError("either way")

@pytest.mark.skip(reason="not here")
def test_is_skipped():
    pass

def test_takes_the_process_with_it():
    os._exit(3)

def test_takes_for_ever():
    while True:
        pass
"""


@pytest.mark.nightly
def test_what_differs_is_found_and_explained(tmp_path: Path) -> None:
    """A test that looks for modes, one that waits for a tensor to go, one that divides by 0: and nothing else raises a question."""
    (tmp_path / "checkout").mkdir()
    (tmp_path / "work").mkdir()
    (tmp_path / "checkout" / "test_own.py").write_text(SUITE, encoding="utf-8")
    suite = Suite("own", "torch", ("test_own.py",), longest=3)
    found = run.measure(run.Bench(suite, tmp_path / "checkout", "", sys.executable, tmp_path / "work"), 1)
    assert (found.tests, found.passed, found.unsteady) == (8, 2, [])
    why = {one.test.partition("::")[2]: one.why for one in found.differ}
    assert why == {"test_is_alone": run.PROBES["mode"][1], "test_lets_go": run.PROBES["holding-nothing"][1]}
    assert [one.test for one in found.incidents] == ["test_own.py::test_divides"]
    assert found.open() == ["test_own.py::test_divides"] and "1 / weight" in found.incidents[0].words


def test_the_page_says_what_is_open(tmp_path: Path) -> None:
    """What nobody explains stands out, and a result is read as it was written."""
    differs = page.Differs("a.py::test_a", "passed", "failed", "AssertionError", "")
    known, unknown = page.Said("a.py::test_b", "x / y gave +inf", "divides by 0"), page.Said("a.py::test_c", "z gave NaN")
    result = page.Result(
        "own", "1.0", "1.1", "2.13.0", 2, 9, 8, 7, 1.5, 2.0, [differs], ["a.py::test_d"], [known, unknown], [], "2026-01-01", 1
    )
    assert result.open() == ["a.py::test_a", "a.py::test_c"]
    text = page.render([result])
    assert "| own | 1.0 | 1.1 | 2.13.0 | 9 | 8 | 7 | 1 | 1, 1 | all | 2.0 | 2026-01-01 |" in text
    assert "Not explained (1):\n\n- `test_a`" in text and "| `test_c` | **open** | z gave NaN |" in text
    (tmp_path / "own.json").write_text(run.json.dumps(asdict(result)), encoding="utf-8")
    assert page.load(tmp_path / "own.json") == result
