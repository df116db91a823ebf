"""What came of a suite, as data, and the page of all of them."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

HEAD = """# The tests of others

The test suites of torch and of the frameworks, each test run bare and inside `nanscope.watch()`: no outcome may change, and each incident must
be a true one. `tests/foreign/run.py` runs them, and writes this page. *Looked at deeply* are the first three steps, and of the others as
many as the row says. *Times as long* is the time of the tests that pass either way, without opening and closing the block; these tests are
hardly more than calls on tiny tensors, where watching costs most: what it costs a training run stands in [Costs and limits](costs.md).

| suite | its version | of | torch | tests | pass either way | backward passes | outcomes that differ | incidents (true, open) | looked at deeply | times as long | on |
| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |
"""


@dataclass(frozen=True, slots=True)
class Differs:
    """A test that ends in another way when it is watched. why: "" if nobody knows."""

    test: str
    bare: str
    watched: str
    raised: str
    why: str


@dataclass(frozen=True, slots=True)
class Said:
    """What nanscope said of a test. does: what the test does, where that is known to be bad."""

    test: str
    words: str
    does: str = ""


@dataclass(slots=True)
class Result:
    """What came of one suite. of: the version of the tests. version: of what they test. every: one test in so many was run. seconds: of the tests that pass, bare. ratio: watched to bare.
    deep: of so many steps one was looked at deeply."""

    name: str
    of: str
    version: str
    torch: str
    every: int
    tests: int
    passed: int
    backwards: int
    seconds: float
    ratio: float
    differ: list[Differs] = field(default_factory=list)
    unsteady: list[str] = field(default_factory=list)
    incidents: list[Said] = field(default_factory=list)
    gaps: list[Said] = field(default_factory=list)
    on: str = ""
    deep: int = 100

    def open(self) -> list[str]:
        """Return the tests that raise a question."""
        return [one.test for one in self.differ if not one.why] + [one.test for one in self.incidents if not one.does]


def load(path: Path) -> Result:
    """Read a result."""
    data = json.loads(path.read_text(encoding="utf-8"))
    for name, kind in (("differ", Differs), ("incidents", Said), ("gaps", Said)):
        data[name] = [kind(**row) for row in data[name]]
    return Result(**data)


def line(result: Result) -> str:
    """Return one line for the terminal."""
    return (
        f"{result.name:20}{result.tests} tests: {result.passed} pass either way, {len(result.differ)} differ, "
        f"{len(result.unsteady)} unsteady, {len(result.incidents)} incidents, {result.ratio:.1f} times as long; open: {result.open() or 'nothing'}"
    )


def render(results: list[Result]) -> str:
    """Return the page."""
    rows = "".join(_row(result) for result in results)
    return HEAD + rows + _sliced(results) + _differing(results) + _incidents(results) + _gaps(results)


def _row(r: Result) -> str:
    does = sum(bool(one.does) for one in r.incidents)
    cells = [
        r.name,
        r.of,
        r.version,
        r.torch,
        r.tests,
        r.passed,
        r.backwards,
        len(r.differ),
        f"{does}, {len(r.incidents) - does}",
        "all" if r.deep == 1 else f"1 in {r.deep}",
        f"{r.ratio:.1f}",
        r.on,
    ]
    return f"| {' | '.join(map(str, cells))} |\n"


def _sliced(results: list[Result]) -> str:
    parts = [f"{r.name} 1 in {r.every}" for r in results if r.every > 1]
    return f"\nOf some suites a part of the tests is run, evenly: {', '.join(parts)}.\n" if parts else ""


def _differing(results: list[Result]) -> str:
    text = "\n## Outcomes that differ\n"
    found = [one for result in results for one in result.differ]
    for why in dict.fromkeys(one.why for one in found):
        names = [f"`{_short(one.test)}`" for one in found if one.why == why]
        text += f"\n{(why or 'not explained')[0].upper()}{(why or 'not explained')[1:]} ({len(names)}):\n\n" + "".join(
            f"- {name}\n" for name in names
        )
    return text + ("" if found else "\nNone.\n")


def _incidents(results: list[Result]) -> str:
    text = "\n## Incidents\n\n"
    found = [one for result in results for one in result.incidents]
    if not found:
        return text + "None.\n"
    text += "| test | what it does | what was said |\n| --- | --- | --- |\n"
    for one in {(one.test, one.words.partition(":")[0]): one for one in found}.values():
        text += f"| `{_short(one.test)}` | {one.does or '**open**'} | {one.words} |\n".replace("|inf|", "inf")
    return text


def _gaps(results: list[Result]) -> str:
    found = Counter(one.words.partition(":")[0] for result in results for one in result.gaps)
    if not found:
        return ""
    rows = "".join(f"- {count} × [{slug}](messages.md#{slug})\n" for slug, count in found.most_common())
    return "\n## Not seen\n\nWhat was said to have gone unseen, in so many tests:\n\n" + rows


def _short(test: str) -> str:
    return test.split("::", 1)[-1]
