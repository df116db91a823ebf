"""A step under each tool, by turns: seconds, ratios, memory, waits, and whether the weights became the same.

There is one model and one optimizer. In each round every tool gets the same weights back, at the same addresses, makes a few steps that are
not timed and then those that are; the order rotates. What is timed is a step of a run that goes on: from the fourth on a loss is known.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from nanscope.bench import tools
from nanscope.bench.measure import (
    Figures,
    Seconds,
    answer_of,
    bits_equal,
    compared,
    count_waits,
    device_here,
    memory,
    rotated,
    seconds_of,
    start,
)
from nanscope.bench.steps import WORKS
from nanscope.bench.tools import AGAIN, BARE, DEEP, NANSCOPE, After, Tool, Watched
from nanscope.errors import NanscopeError
from nanscope.snapshot.runs import DEEP_EVERY

SETTLING = 3  # steps that are not timed
REMEMBERED = 2  # steps of the process whose memory is measured


def by_turns(
    work: Watched, shown: Mapping[str, Tool], rounds: int, timed: int, per: float = 1, device: str = "cpu"
) -> tuple[list[Figures], list[str]]:
    """Return a row for each tool, and what is to be said below.

    timed: steps of a round that are. per: how many of what is counted one step of the work makes: of several, one is enough to settle.
    Raises NanscopeError if the weights become others than without a tool.
    """
    times: dict[str, list[list[Seconds]]] = {name: [] for name in shown}
    allocated: dict[str, int] = {}
    waits: dict[str, int] = {}
    other: set[str] = set()
    expected: list[Tensor] = []
    for turn in range(rounds):
        for name in rotated(shown, turn):
            work.restore()
            if device == "cuda":
                torch.cuda.reset_peak_memory_stats()
            with shown[name](work) as after:
                step = partial(_step, work, after)
                for _ in range(SETTLING if per == 1 else 1):
                    step()
                times[name].append([seconds_of(step, device) for _ in range(timed)])
                reached = list(work.weights())
                if device == "cuda":
                    allocated[name] = torch.cuda.max_memory_allocated()
                    if not turn:
                        waits[name] = count_waits(step)
            expected = expected or reached
            if not bits_equal(reached, expected):
                other.add(name)
    rows = [compared(name, times[name], times[BARE], per, cpu=device == "cpu") for name in shown]
    if device == "cuda":
        rows = [
            replace(row, peak=float(allocated[row.name]), peak_ratio=allocated[row.name] / allocated[BARE], waits=waits[row.name])
            for row in rows
        ]
    return rows, _said(rows, other, expected, device)


def _step(work: Watched, after: After) -> None:
    work.step()
    after()


def _said(rows: Sequence[Figures], other: set[str], expected: Sequence[Tensor], device: str) -> list[str]:
    """What there is to say of the weights, and of deep looks. Raises NanscopeError for what must not be."""
    if not all(bool(weight.isfinite().all()) for weight in expected):
        raise NanscopeError("the weights are not finite", slug="bench-failed")
    if other & {BARE, AGAIN} and device == "cuda":
        said = ["weights: bare does not repeat itself to the last bit here, so nothing can be said of the others"]
    elif other & {BARE, AGAIN}:
        raise NanscopeError("a bare run on a CPU does not repeat itself to the last bit", slug="bench-failed")
    elif changed := sorted(other & {NANSCOPE, DEEP}):
        raise NanscopeError(f"the weights are not those of the bare run: {', '.join(changed)}", slug="bench-failed")
    else:
        said = ["weights: the same to the last bit, bare and nanscope, in every round; nanscope saw every step"]
        said += [f"weights: others than those of the bare run under {', '.join(sorted(other))}"] if other else []
    ratio = {row.name: row.ratio.median for row in rows if row.ratio is not None}
    if {DEEP, NANSCOPE} <= set(ratio):
        said.append(f"deep looks in one of {DEEP_EVERY} steps: {(ratio[DEEP] - ratio[NANSCOPE]) / DEEP_EVERY:+.2%} of a bare step")
    return said


def peak_of(name: str, tool: str) -> int:
    """Return the most bytes that this process ever held when it has made some steps under one tool: a process of its own."""
    work = WORKS[name]("cpu")
    with tools.TOOLS[tool](work) as after:
        for _ in range(REMEMBERED):
            _step(work, after)
    held = memory("VmHWM")
    if held is not None:
        return held
    import resource  # not on Windows

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def peaks(name: str, shown: Mapping[str, Tool]) -> dict[str, float]:
    """Return the peak of each tool, in bytes. Two processes run at a time: nothing is timed."""
    found: dict[str, float] = {}
    every = list(shown)
    for at in range(0, len(every), 2):
        started = {tool: start("turns:peak_of", name, tool) for tool in every[at : at + 2]}
        found |= {tool: float(answer_of(process, f"{name} under {tool}")) for tool, process in started.items()}
    return found


def trained(name: str, rounds: int, timed: int, remembered: bool) -> tuple[list[Figures], list[str]]:
    """Measure one of `WORKS` under every tool that there is. remembered: memory, too, which on a CPU takes a process for each tool."""
    device = device_here()
    shown = tools.present()
    held = peaks(name, shown) if remembered and device == "cpu" else {}
    rows, said = by_turns(WORKS[name](device), shown, rounds, timed, device=device)
    if held:
        rows = [replace(row, peak=held[row.name], peak_ratio=held[row.name] / held[BARE]) for row in rows]
    return rows, [*said, *(f"{tool} is left out: {why}" for tool, why in tools.absent().items())]
