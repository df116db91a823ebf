"""Writes what stands in the tables of docs/workers.md and docs/trainers.md: what nanscope says of each framework's own training step, and of
each trainer, as it came out just now.

`python tests/workers/table.py docs/workers.md`, in the environment of .ci/native; see the page for checkouts. `python tests/workers/table.py
docs/trainers.md`, where the packages of tests/native/trainers.txt are installed, too. What is not installed keeps its rows, and with names of
frameworks behind the page so does every other. The rest of a page is written by hand.
"""

from __future__ import annotations

import re
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import trainer_cases
import worker_cases
from cases import Expected, told

PHASES = ("healthy", "input", "forward", "backward", "optimizer", "weights")
PAGES = {"workers.md": worker_cases.EXPECTED, "trainers.md": trainer_cases.EXPECTED}
SAID, RIGHT = "| framework |", "| trainer |"  # how the heads of the tables begin


def shown(sentence: str) -> str:
    """One line of a table, without the places of this machine."""
    return re.sub(r"\|", "\\|", sentence).replace("*", "\\*")


def filled(lines: list[str], head: str, rows: Sequence[str]) -> list[str]:
    """Put rows into the table whose head begins so, instead of those that are there; a page without it stays as it is."""
    begin = next((place + 2 for place, line in enumerate(lines) if line.startswith(head)), None)
    if begin is None:
        return lines
    end = next((place for place in range(begin, len(lines)) if not lines[place].startswith("|")), len(lines))
    return [*lines[:begin], *rows, *lines[end:]]


def row_of(one: Expected, out: Path) -> str:
    """Run a case; return its row."""
    line = told(PAGES["workers.md"] if one.kind == "worker" else PAGES["trainers.md"], one.driver, one.ranks, out)[0][one.case]
    right = "yes" if not one.misses(line) else f"no: {one.known or one.misses(line)[0]}"
    said = "silent" if line["status"] == "healthy" else shown(line["sentence"])
    return f"| {one.driver} | {line['version']} | `{line['entry']}` {key_of(one)} {said} | {right} |"


def key_of(one: Expected) -> str:
    """What a row is found by, beside its framework."""
    return f"| {one.ranks} | {one.case} |"


def matrix(rows: Sequence[str]) -> list[str]:
    """Return a line for each trainer: is each of its runs right?"""
    found: dict[tuple[str, str, str], dict[str, str]] = {}
    for framework, version, entry, _, case, *_, right in ([cell.strip() for cell in re.split(r"(?<!\\)\|", row)[1:-1]] for row in rows):
        found.setdefault((framework, version, entry.strip("`")), {})[case.rpartition(": ")[2]] = right.partition(":")[0]
    return [
        f"| {trainer} | {framework} {version} | {' | '.join(runs.get(phase, '') for phase in PHASES)} |"
        for (framework, version, trainer), runs in found.items()
    ]


def main(page: Path, drivers: list[str]) -> None:
    lines = page.read_text(encoding="utf-8").splitlines()
    rows = []
    with tempfile.TemporaryDirectory() as out:
        for one in PAGES[page.name]:
            if one.missing or (drivers and one.driver not in drivers):
                rows += [line for line in lines if key_of(one) in line and line.startswith(f"| {one.driver} |")]
            else:
                rows.append(row_of(one, Path(out)))
    page.write_text("\n".join(filled(filled(lines, SAID, rows), RIGHT, matrix(rows))) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
