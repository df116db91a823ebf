"""Writes docs/foresight.md: what `check` finds of the 79 known bugs of 63 programs, each on a healthy batch.

`python tests/foresight/page.py docs/foresight.md`; `tests/test_foresight_check.py` holds that each is found, and that the mended twins are not accused.
"""

from __future__ import annotations

import sys
import time
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from foresight import formulas
from foresight.corpus import Bug, Program
from foresight.subjects import SUBJECTS

from nanscope.foresight.hazard import Check, Hazard
from nanscope.foresight.search import check
from nanscope.watching.checking import recorded

LINES = Path(formulas.__file__).read_text(encoding="utf-8").splitlines()
HEAD = """# What foresight finds

GRIST (ESEC/FSE 2021) collected 79 numerical bugs of 63 real programs, mostly losses of TensorFlow 1, and exposed 78 of them by a gradient search for an
input that triggers them; RANUM (ICSE 2023) detected all by abstract interpretation. Here they stand as torch functions, written anew from their
formulas (`tests/foresight/`). `nanscope check` gets each with a *healthy* batch, whose loss and gradient are finite, and is to name the operator and the line that
goes wrong. Each trigger below was executed within what it says, and so was its fix; of the mended twin of each program nothing is said that training
can reach.

The methods of the papers look at what an operator is given, or at the loss. Of the 79, 8 never reach the loss, and 47 more have batches whose loss is
finite and whose gradient is not: 55 that a look at the loss may miss. *silent* says that the trigger which was found is one of those.

This page is written by `python tests/foresight/page.py docs/foresight.md`.

| bug | program | operator | trigger found | | fix, executed | seconds |
| --- | --- | --- | --- | --- | --- | --- |
"""


def row(bug: Bug, name: str, found: Check, seconds: float) -> str:
    """One bug: of the hazards of its line and operator the first."""
    same = (hazard for hazard in found.hazards if (hazard.origin.op, text(hazard)) == (bug.op, bug.line))
    hazard = next(same)
    fix = hazard.fix.label if hazard.fix is not None and hazard.fix.works else "none"
    words = (bug.name, name, bug.op, hazard.trigger.words, "silent" if hazard.spoils.silent else "", fix, f"{seconds:.1f}")
    return "| " + " | ".join(escaped(word) for word in words) + " |"


def text(hazard: Hazard) -> str:
    """What stands in its line."""
    return LINES[(hazard.origin.line or 1) - 1].strip()


def escaped(words: str) -> str:
    """Text that stays text in Markdown."""
    for mark in "\\|_[]*<":
        words = words.replace(mark, f"\\{mark}")
    return words


def rows(program: Program, name: str) -> list[str]:
    """All bugs of a program, which is checked once."""
    begun = time.perf_counter()
    found = check(recorded(program.loss, program.batch()))
    seconds = time.perf_counter() - begun
    return [row(bug, name, found, seconds) for bug in program.bugs]


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    every = [line for subject in SUBJECTS for program in subject.programs for line in rows(program, subject.name)]
    Path(sys.argv[1]).write_text(HEAD + "\n".join(every) + "\n", encoding="utf-8")
