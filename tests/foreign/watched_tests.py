"""A pytest plugin: the call of each test inside `nanscope.watch(deep_every=1)`, and one line of JSON of what came of it.

    PYTHONPATH=tests/foreign pytest -p watched_tests --told lines.jsonl --under watch …

    {"id": "test_ppo.py::test_clip", "begun": true}
    {"id": "test_ppo.py::test_clip", "outcome": "passed", "raised": "", "seconds": 0.21, "told": {"status": "healthy", …}}

`--keep` moves the files of incidents to a folder. `--under` nothing the same test is run bare; `mode` and `holding-nothing` tell why one differs that does. Every test begins with the same seeds. One that takes longer than `--longest` seconds is ended.
A line that has begun and was not ended is of a test that took the process with it.
"""

from __future__ import annotations

import json
import logging
import random
import re
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Generator, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import numpy
import pytest
import torch
from suites import DEEP
from torch.utils._python_dispatch import TorchDispatchMode

import nanscope
from nanscope.capture.tape import BUDGET

UNDER = {
    "nothing": "bare",
    "watch": "inside nanscope.watch(deep_every=1)",
    "holding-nothing": "inside nanscope.watch(deep_every=1, budget=1)",
    "mode": "inside a dispatch mode that passes every call on, as torch's own modes do, and without nanscope",
}


class PassesOn(TorchDispatchMode):
    """What torch does not do under this one, it does under none."""

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Compiled code stays compiled."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class TookTooLong(BaseException):
    """No `Exception`: neither a test nor nanscope is to catch it."""


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("nanscope")
    group.addoption("--told", type=Path, required=True, help="the file that the lines are appended to")
    group.addoption("--under", choices=tuple(UNDER), default="nothing", help="; ".join(f"{name}: {what}" for name, what in UNDER.items()))
    group.addoption("--longest", type=int, default=60, help="seconds of one test")
    group.addoption("--keep", type=Path, help="the folder that files of incidents are moved to")
    group.addoption("--without", action="append", default=[], help="a package that is not there for the tests")
    group.addoption("--list-ids", type=Path, help="a file that the names of all tests are written to")
    group.addoption("--only-ids", type=Path, help="a file of the tests to run, one a line; the others are left out")


def pytest_configure(config: pytest.Config) -> None:
    sys.modules.update(dict.fromkeys(config.getoption("--without")))  # type: ignore[arg-type]
    config.pluginmanager.register(Teller(config), "nanscope-teller")


class Sayings(logging.Handler):
    """Keeps what nanscope says on the log."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


class Teller:
    """Runs the tests, and writes the lines."""

    def __init__(self, config: pytest.Config) -> None:
        self.path: Path = config.getoption("--told").resolve()
        self.under: str = config.getoption("--under")
        self.longest: int = config.getoption("--longest")
        self.keep: Path | None = config.getoption("--keep")
        self.listed: Path | None = config.getoption("--list-ids")
        ids: Path | None = config.getoption("--only-ids")
        self.only = None if ids is None else set(ids.read_text(encoding="utf-8").splitlines())
        self.line: dict[str, Any] = {}
        self.kind = ""

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Leave out what was not asked for."""
        if self.listed is not None:
            self.listed.write_text("\n".join(item.nodeid for item in items), encoding="utf-8")
        if self.only is not None:
            items[:] = [item for item in items if item.nodeid in self.only]

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """Say which test begins."""
        self.line = {"id": nodeid, "outcome": "", "raised": "", "seconds": 0.0, "told": None}
        self.write({"id": nodeid, "begun": True})

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self) -> Generator[None, object, object]:
        """Put the call under what was asked for."""
        seed()
        with self.around(), limited(self.longest):
            return (yield)

    def around(self) -> AbstractContextManager[None]:
        """Return what the call is put under."""
        if self.under == "nothing":
            return timed(self.line)
        if self.under == "mode":
            return moded(self.line)
        return watching(self.line, 1 if self.under == "holding-nothing" else BUDGET, self.keep)

    def pytest_runtest_makereport(self, call: pytest.CallInfo[None]) -> None:
        """Take the class of what was raised."""
        self.kind = call.excinfo.typename if call.excinfo is not None else ""

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Take the outcome, the first that is not `passed`."""
        if (report.when == "call" or not report.passed) and self.line["outcome"] in ("", "passed"):
            self.line["outcome"] = report.outcome if report.when == "call" or report.skipped else "error"
            if report.failed:
                crash = getattr(report.longrepr, "reprcrash", None)
                self.line["raised"] = f"{self.kind}: {getattr(crash, 'message', report.longrepr)}"[:2000]

    def pytest_runtest_logfinish(self) -> None:
        """Write what came of the test."""
        self.write(self.line)

    def write(self, line: dict[str, Any]) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


def seed() -> None:
    random.seed(0)
    numpy.random.seed(0)
    torch.manual_seed(0)


@contextmanager
def timed(line: dict[str, Any]) -> Iterator[None]:
    begin = time.perf_counter()
    try:
        yield
    finally:
        line["seconds"] = time.perf_counter() - begin


@contextmanager
def moded(line: dict[str, Any]) -> Iterator[None]:
    with PassesOn(), timed(line):
        yield


@contextmanager
def watching(line: dict[str, Any], budget: int, keep: Path | None) -> Iterator[None]:
    """Watch, and write into the line what was said."""
    folder, sayings = tempfile.mkdtemp(prefix="nanscope-foreign-"), Sayings()
    logger = logging.getLogger("nanscope")
    logger.addHandler(sayings)
    scope = nanscope.watch(out=folder, budget=budget, deep_every=DEEP)
    try:
        with scope, timed(line):
            yield
    finally:
        logger.removeHandler(sayings)
        try:
            line["told"] = told(scope, sayings.lines)
            if keep is not None and line["told"]["incidents"]:
                keep.mkdir(exist_ok=True)
                shutil.move(folder, keep / re.sub(r"\W+", "-", line["id"])[-200:])
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def told(scope: nanscope.Scope, lines: list[str]) -> dict[str, Any]:
    """Return what was said of a test."""
    verdict = scope.verdict
    incidents = [{"phase": str(i.phase), "cause": str(i.cause), "sentence": i.sentence} for i in verdict.incidents]
    gaps = [f"{gap.slug}: {gap.text}" for gap in verdict.gaps]
    return {
        "status": str(verdict.status), "steps": scope.steps, "backwards": scope.backwards, "incidents": incidents, "gaps": gaps, "log": lines,
    }  # fmt: skip


@contextmanager
def limited(seconds: int) -> Iterator[None]:
    """End what takes longer."""

    def end(number: int, frame: FrameType | None) -> None:
        raise TookTooLong(f"longer than {seconds} s")

    before = signal.signal(signal.SIGALRM, end)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
