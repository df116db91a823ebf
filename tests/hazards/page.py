"""Writes docs/hazards.md: what `check` says of the frameworks' losses as they are installed here.

`python tests/hazards/page.py docs/hazards.md`, in the environment of .ci/native with TRL and Liger, and with checkouts of NeMo-RL and prime-rl and
torchtitan's package on the path; see the page. A framework that is not there keeps its part of the page, and with names of frameworks behind the
page so does every other.
"""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from hazards.agreement import Cell, cells
from hazards.steps import NAMES, asked, batch, from_the_door, missing, step, version

from nanscope.foresight.hazard import Check, Hazard, Safeguard
from nanscope.foresight.pushes import Severity
from nanscope.foresight.search import check
from nanscope.frameworks.losses import LOSSES
from nanscope.frameworks.paths import LossPath
from nanscope.text import is_exact, number

HEAD = """# The hazards of today's losses

`nanscope check` on recorded healthy steps of the frameworks' own loss functions, as they are installed: every loss with its defaults, and
under the settings that change how it fails. A step has four rows of three tokens that count and one that does not; the log-probs of the policies are within a
fifth of a nat of each other; the program begins where the framework's function does. Every hazard that is counted here was executed: its trigger stands in the step,
and the loss or a gradient is not finite.

*Reachable in training*, *only by broken data* and *only in theory* are what [Check](check.md) says they are. Reachable does not mean likely: a
log-ratio of 88 nats takes a sampler and a trainer that have come apart, or a token that the loss does not count and nobody looks at. *Lines* counts
the lines of code that training can bring down, *guards* those without which there would be more. A line of code has one row for each kind of token and of
trigger; the trigger is the smallest of all losses that the line is in, which the last column names.

This page is written by `python tests/hazards/page.py docs/hazards.md`, and `tests/test_hazards.py` holds its figures, against whatever is installed. NeMo-RL and
prime-rl are not on PyPI; they are used where a checkout is on the path, torchtitan's loss without the package around it, which asks for vLLM:

```bash
PYTHONPATH=RL:prime-rl/src NANSCOPE_NEMO_RL_VERSION=7ea279ab NANSCOPE_PRIME_RL_VERSION=559b447 python tests/hazards/page.py docs/hazards.md
```

"""
AGREES = """## Held against the atlas

The [atlas](atlas.md) runs a loss with one fault in it: −inf, NaN or a log-ratio of ±200 nats, in one tensor, at a token that counts or at a masked one,
under either sign of the advantage; or a mask that selects nothing. `check` is not told of these faults. What it
tries at the tokens of a recorded healthy step of the same loss should spoil the loss where the atlas says so, and the gradient where the atlas says so, and
nothing else:

"""
_BRANCH = (
    "verl divides the weights by their mean only where that is above a threshold, a branch of Python's; the recorded program always divides"
)
REASONS = {  # loss, and how its faults begin → why `check` says otherwise
    ("verl.vanilla", "old NaN valid"): _BRANCH,
    ("verl.vanilla", "empty batch"): _BRANCH,
    (
        "verl.kl_cov",
        "empty batch",
    ): "how many tokens are picked is a number of Python's, which the recording holds; with none left to pick from "
    "the recorded program ends in an error",
    (
        "torchtitan.dapo",
        "policy NaN valid",
    ): "this loss is given logits, and the gradient of a softmax over a NaN is NaN; that of a log-prob is 0",
    (
        "liger.luspo",
        "ref",
    ): "this loss counts the KL of masked tokens, so that one counted token stands for both; there the same hazard is found",
}
SUMMARY = "| framework | version | losses and settings | without a reachable hazard | reachable | only by broken data | only in theory | lines | guards |"
ROWS = "| loss | reachable | only by broken data | only in theory |"
LINES = "| line | what stands there | smallest trigger | it spoils | fix, executed | healthy gradient | in |"
GUARDS = "| guard | what stands there | what it is good for | in |"
AGREEMENT = "| framework | cells | agree | differ |"


@dataclass(frozen=True, slots=True)
class Found:
    """What was found of one loss path."""

    path: LossPath
    check: Check
    cells: tuple[Cell, ...]

    def count(self, severity: Severity) -> int:
        """Return how many of its hazards are this severe."""
        return sum(hazard.severity is severity for hazard in self.check.hazards)

    @property
    def row(self) -> str:
        """Return its line in the table of its framework."""
        return f"| {plain(self.path.name)} | {' | '.join(str(self.count(severity)) for severity in Severity)} |"


def find(path: LossPath) -> Found:
    """Check one loss path, and hold it against the atlas, where that knows it."""
    torch.set_num_threads(1)
    before = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        missing(path.framework)
        return Found(path, check(from_the_door(step(path, batch()))), tuple(cells(path)) if path.key in LOSSES else ())
    finally:
        logging.disable(before)  # the process may be that of other tests


def plain(text: str) -> str:
    """Return a text as a cell of a table holds it."""
    return re.sub(r"([|*_<>\[\]])", r"\\\1", " ".join(text.split()))


def code(text: str) -> str:
    """Return a text as code in a cell of a table."""
    return f"`{' '.join(text.split()).replace('|', chr(92) + '|')}`"


def section(framework: str, found: Sequence[Found]) -> str:
    """Return what stands under the heading of a framework."""
    rows = "\n".join(one.row for one in found)
    lines = "\n".join(_lines(found))
    told = f"{LINES}\n{rule(LINES)}\n{lines}\n" if lines else "Nothing that training can reach.\n"
    return f"## {NAMES[framework]}\n\n{version(framework)}, {len(found)} losses and settings.\n\n{told}{_guarded(found)}{_differing(found)}\n{ROWS}\n{rule(ROWS)}\n{rows}\n"


def _guarded(found: Sequence[Found]) -> str:
    """Return what in the code keeps further hazards away, each line once."""
    alike: dict[tuple[str, int, str], list[tuple[LossPath, Safeguard]]] = {}
    for one in found:
        for guard in one.check.guards:
            if guard.severity is Severity.REACHABLE:
                alike.setdefault((guard.file, guard.line, guard.stops), []).append((one.path, guard))
    lines = []
    for _, same in sorted(alike.items(), key=lambda item: item[0]):
        guard = same[0][1]
        lines.append(
            f"| {guard.where} | {code(guard.expression)} | {plain(guard.words)} | {_in([path for path, _ in same], len(found))} |\n"
        )
    return f"\n{GUARDS}\n{rule(GUARDS)}\n{''.join(lines)}" if lines else ""


def _in(paths: Sequence[LossPath], of: int) -> str:
    """Return in which of so many losses something is."""
    names = list(dict.fromkeys(path.name for path in paths))
    if len(names) == of > 1:
        return f"all {of}"
    return plain(f"{len(names)} of {of}: {', '.join(names[:2])}{', …' if len(names) > 2 else ''}")


def _differing(found: Sequence[Found]) -> str:
    """Return in which cells `check` and the atlas do not say the same, and why."""
    lines = [f"- {plain(cell.words)}: {reason(cell)}\n" for one in found for cell in one.cells if not cell.agrees]
    return f"\nOtherwise than the atlas:\n\n{''.join(lines)}" if lines else ""


def reason(cell: Cell) -> str:
    """Return why a cell differs, as far as somebody has looked."""
    return next((why for (key, fault), why in REASONS.items() if key == cell.path.key and cell.fault.name.startswith(fault)), "**open**")


def rule(head: str) -> str:
    """Return the rule under the head of a table."""
    return "|" + " --- |" * (head.count("|") - 1)


def _lines(found: Sequence[Found]) -> list[str]:
    """What training can reach, each line and kind of token once, with the smallest trigger of all losses."""
    alike: dict[tuple[object, ...], list[tuple[LossPath, Hazard]]] = {}
    for one in found:
        for hazard in one.check.reachable:
            key = (*hazard.place, hazard.origin.op, hazard.trigger.masked is True, hazard.trigger.kind, hazard.spoils.silent)
            alike.setdefault(key, []).append((one.path, hazard))
    return [_line(same, len(found)) for _, same in sorted(alike.items(), key=lambda item: item[0])]


def _line(same: Sequence[tuple[LossPath, Hazard]], of: int) -> str:
    hazard = min((hazard for _, hazard in same), key=lambda one: one.trigger.distance or 0.0)
    fix = hazard.fix
    fixed = (
        "none known"
        if fix is None
        else fix.label + ("" if fix.executed and fix.works else " (does not heal)" if fix.executed else " (not run)")
    )
    told = [plain(hazard.trigger.words), hazard.spoils.words, plain(fixed), _change(hazard), _in([path for path, _ in same], of)]
    return f"| {hazard.where} | {code(hazard.line)} | {' | '.join(told)} |"


def _change(hazard: Hazard) -> str:
    if hazard.fix is None or hazard.change is None:
        return "not measured"
    return "as it was" if is_exact(hazard.change) else f"{number(100 * hazard.change)} % off"


def summary(framework: str, found: Sequence[Found]) -> str:
    """Return the line of a framework in the first table."""
    counts = [sum(one.count(severity) for one in found) for severity in Severity]
    free = sum(not one.check.reachable for one in found)
    lines = len({hazard.place for one in found for hazard in one.check.reachable})
    guards = len({(guard.file, guard.line) for one in found for guard in one.check.guards if guard.severity is Severity.REACHABLE})
    return f"| {NAMES[framework]} | {version(framework)} | {len(found)} | {free} | {' | '.join(map(str, counts))} | {lines} | {guards} |"


def agreement(framework: str, found: Sequence[Found]) -> str:
    """Return the line of a framework in the table of agreement."""
    told = [cell for one in found for cell in one.cells]
    agree = sum(cell.agrees for cell in told)
    return f"| {NAMES[framework]} | {len(told)} | {agree} | {len(told) - agree} |"


def parts(page: str) -> dict[str, tuple[str, str, str]]:
    """Return what a page says of each framework: its line in the first table, its line in the second, and its section."""
    found = {}
    for framework, name in NAMES.items():
        lines = [line for line in page.splitlines() if line.startswith(f"| {name} |")]
        told = re.search(rf"^## {re.escape(name)}\n.*?(?=^## |\Z)", page, re.MULTILINE | re.DOTALL)
        if len(lines) == 2 and told:
            found[framework] = lines[0], lines[1], told[0].strip() + "\n"
    return found


def written(known: dict[str, tuple[str, str, str]]) -> str:
    """Return the page."""
    said = [known[framework] for framework in NAMES if framework in known]
    first = "\n".join([SUMMARY, rule(SUMMARY), *(line for line, _, _ in said)])
    second = "\n".join([AGREEMENT, rule(AGREEMENT), *(line for _, line, _ in said)])
    return f"{HEAD}{first}\n\n{AGREES}{second}\n\n" + "\n".join(section for _, _, section in said)


def main(page: Path, wanted: Sequence[str]) -> None:
    """Write the page. wanted: prefixes of the frameworks that are asked anew, none is all."""
    known = parts(page.read_text(encoding="utf-8")) if page.exists() else {}
    with ProcessPoolExecutor(2) as pool:
        for framework in NAMES:
            why = missing(framework)
            if (wanted and framework not in wanted) or why is not None:
                print(f"{NAMES[framework]} is left as it is{f': {why}' if why else ''}")
                continue
            found = list(pool.map(find, asked(framework)))
            print("\n".join(f"{cell.words}: {reason(cell)}" for one in found for cell in one.cells if not cell.agrees))
            known[framework] = summary(framework, found), agreement(framework, found), section(framework, found)
            page.write_text(written(known), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
