"""From a bad loss to what a person reads: the hit, the verdict, the file, and each verb in a process of its own, by the size of the batch.

A GRPO loss with KL over [B, T] log-probabilities, one masked token whose ratio overflows, one backward pass. Each size runs in a process of
its own. "backward" is what the same backward pass takes without nanscope; "hit" is what it takes with the look at the bad step and its
snapshot; "verdict" is diagnosing it with every fix executed. What a verb takes stands beside `import torch`, which is the most of it. The
memory of a verdict is how far a process went beyond what it held when the loss was there, in one more process, from which what is freed
is taken at once, for what the C library keeps is nobody's; its ratio is to the snapshot, which is in it; against it counts the graph of
the loss, some 1.5 times the snapshot, which backward frees before the diagnosis needs most.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nanscope.bench.measure import MIB, Figures, Quartiles, alone, ended, forget_peak, memory, python, ratios, rotated
from nanscope.capture.tape import BUDGET
from nanscope.errors import NanscopeError
from nanscope.snapshot.file import load, save
from nanscope.text import listed
from nanscope.watching.scope import watch

SHRINKS = {"MALLOC_MMAP_THRESHOLD_": str(MIB)}  # what is freed leaves the process, and is not counted as held; it takes its time
WRITES = 3  # of the file, and of as many bytes beside it
IMPORT = "import torch"
HELD = 128  # bytes a token: a tensor of float32 may take an eighth of the budget
CHECKED = 1 << 18  # tokens of a batch that is checked: every hazard is run on all of it, which takes minutes for a large one


def batch(rows: int, tokens: int) -> tuple[Tensor, ...]:
    """Return log-probs of policy, old policy and reference, advantages and mask; one masked token is far off."""
    torch.manual_seed(0)
    log_probs = (-2 * torch.rand(rows, tokens)).requires_grad_()
    old_log_probs = log_probs.detach() + 0.05 * torch.randn(rows, tokens)
    ref_log_probs = log_probs.detach() + 0.1 * torch.randn(rows, tokens)
    mask = (torch.arange(tokens) < torch.randint(tokens // 2, tokens, (rows, 1))).float()
    old_log_probs[rows // 2, tokens - 1] = -200.0
    return log_probs, old_log_probs, ref_log_probs, torch.randn(rows, 1), mask


def loss_of(log_probs: Tensor, old_log_probs: Tensor, ref_log_probs: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    """Return a GRPO loss with k3 KL, as trainers write it."""
    ratio = torch.exp(log_probs - old_log_probs)
    clipped_ratio = torch.clamp(ratio, 0.8, 1.2)
    per_token_loss = -torch.min(ratio * advantages, clipped_ratio * advantages)
    per_token_kl = torch.exp(ref_log_probs - log_probs) - (ref_log_probs - log_probs) - 1
    return ((per_token_loss + 0.04 * per_token_kl) * mask).sum() / mask.sum()


def of_size(rows: int, tokens: int, folder: str, budget: int = BUDGET) -> dict[str, Any]:
    """Run one bad step in this process, leave its snapshot in a folder, and return seconds and bytes. budget: of bytes that are held.

    Raises NanscopeError if the origin is not the token that is far off.
    """
    tensors = batch(rows, tokens)
    began = time.perf_counter()
    loss_of(*tensors).backward()  # type: ignore[no-untyped-call]
    backward = time.perf_counter() - began
    with watch(out=folder, budget=budget) as scope:
        loss = loss_of(*tensors)
        before = memory("VmRSS")
        forget_peak()
        began = time.perf_counter()
        loss.backward()  # type: ignore[no-untyped-call]
        hit = time.perf_counter() - began
        began = time.perf_counter()
        verdict = scope.verdict
        diagnosed = time.perf_counter() - began
        (path,) = filter(None, scope.paths)
    origin = verdict.incidents[0].origin
    if (origin.variable, origin.index) != ("ratio", (rows // 2, tokens - 1)):
        raise NanscopeError(f"the origin of {rows}x{tokens} came out wrong: {origin.variable} {origin.index}", slug="bench-failed")
    held = memory("VmHWM")
    return {
        "file": str(path),
        "bytes": path.stat().st_size,
        "grown": held - before if held is not None and before is not None else None,
        "seconds": {"backward, bare": backward, "hit": hit, "verdict": diagnosed},
        "writes": writes(path, Path(folder)),
    }


def writes(path: Path, folder: Path) -> dict[str, list[float]]:
    """Return how long it takes to write a snapshot, and, by turns, the same bytes as they are, both until the disk has them."""
    snapshot, content = load(path), path.read_bytes()
    ways: dict[str, Callable[[], object]] = {
        "snapshot, as bytes": lambda: _raw(content, folder / "raw"),
        "snapshot, written": lambda: save(snapshot, folder / "again"),
    }
    found: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(WRITES):
        for name in rotated(ways, turn):
            began = time.perf_counter()
            ways[name]()
            found[name].append(time.perf_counter() - began)
    return found


def _raw(content: bytes, path: Path) -> None:
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def asked(sizes: Sequence[tuple[int, int]], rounds: int) -> tuple[list[Figures], list[str]]:
    """Measure each size, the verbs by turns."""
    rows: list[Figures] = []
    for size in sizes:
        with tempfile.TemporaryDirectory() as folder:
            found = [alone("asked:of_size", *size, str(Path(folder, str(turn)))) for turn in range(rounds)]
            most = alone("asked:of_size", *size, str(Path(folder, "memory")), **SHRINKS)["grown"]
            verbs = _verbs(Path(found[0]["file"]), Path(folder), rounds, size[0] * size[1] <= CHECKED)
            rows += _of(f"{size[0]}x{size[1]}", found, most, verbs)
    large = [f"{size[0]}x{size[1]}" for size in sizes if size[0] * size[1] > CHECKED]
    said = [f"{listed(large)}: check is left out, it takes minutes"] if large else []
    return rows, ["a recorded step as a file: written by nanscope beside the same bytes, both with fsync", *said]


def tokens(sizes: Sequence[tuple[int, int]], rounds: int) -> tuple[list[Figures], list[str]]:
    """Measure a bad step of each size, by turns, each time in a process of its own that may hold all of it."""
    named = {f"{rows}x{length}": (rows, length) for rows, length in sizes}
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in named}
    for turn in range(rounds):
        for name in rotated(named, turn):
            with tempfile.TemporaryDirectory() as folder:
                found[name].append(alone("asked:of_size", *named[name], folder, max(BUDGET, HELD * prod(named[name])), **SHRINKS))
    figures = []
    for what in ("hit", "verdict"):
        times = {name: [[one["seconds"][what] / prod(named[name])] for one in ones] for name, ones in found.items()}
        for name, per in times.items():
            row = Figures(f"{name} {what}, a token", Quartiles.of([one for (one,) in per]), ratios(per, times[next(iter(named))]))
            grown, file = found[name][-1]["grown"], found[name][-1]["bytes"]
            figures.append(replace(row, peak=grown, peak_ratio=grown / file) if what == "verdict" and grown is not None else row)
    return figures, ["ratios are to the smallest batch; how far a process went beyond what it held before is to the size of its snapshot"]


def _of(size: str, found: Sequence[Mapping[str, Any]], most: float | None, verbs: Mapping[str, list[float]]) -> list[Figures]:
    """Return the rows of one size. most: bytes that a verdict takes, None where the system does not tell."""
    seconds = {name: [one["seconds"][name] for one in found] for name in found[0]["seconds"]}
    bare = [[value] for value in seconds["backward, bare"]]
    rows = [Figures(f"{size} {name}", Quartiles.of(values)) for name, values in seconds.items()]
    rows[1] = Figures(rows[1].name, rows[1].seconds, ratios([[value] for value in seconds["hit"]], bare))
    if most is not None:
        rows[2] = Figures(rows[2].name, rows[2].seconds, peak=most, peak_ratio=most / found[0]["bytes"])
    raw, written = ([time for one in found for time in one["writes"][name]] for name in found[0]["writes"])
    rows.append(Figures(f"{size} snapshot, as bytes", Quartiles.of(raw), peak=float(found[0]["bytes"])))
    rows.append(
        Figures(f"{size} snapshot, written", Quartiles.of(written), ratios([[value] for value in written], [[value] for value in raw]))
    )
    base = [[value] for value in verbs[IMPORT]]
    return [
        *rows,
        *(Figures(f"{size} {name}", Quartiles.of(values), ratios([[value] for value in values], base)) for name, values in verbs.items()),
    ]


def _verbs(file: Path, folder: Path, rounds: int, checked: bool) -> dict[str, list[float]]:
    """Return how long the verbs take in a fresh process, and `import torch` alone, by turns."""
    commands = {
        IMPORT: ["-c", IMPORT],
        "replay": _verb("replay", "--json", str(folder / "replay.json"), str(file)),
        "report": _verb("report", "-o", str(folder / "report.html"), str(file)),
    }
    if checked:
        commands["check"] = _verb("check", "--json", str(folder / "check.json"), str(file))
    found: dict[str, list[float]] = {name: [] for name in commands}
    for turn in range(rounds):
        for name in rotated(commands, turn):
            began = time.perf_counter()
            ended(python(*commands[name]), name)
            found[name].append(time.perf_counter() - began)
    return found


def _verb(*words: str) -> list[str]:
    """Return how a verb is run: whether it found something is its status, and anything but that is a failure."""
    code = (
        "import sys\nfrom nanscope.report.exit import FOUND, HEALTHY, UNSEEN\nfrom nanscope.__main__ import main\n"
        f"sys.argv = {['nanscope', *words]!r}\n"
        "try:\n    main()\nexcept SystemExit as left:\n    sys.exit(0 if left.code in (FOUND, HEALTHY, UNSEEN) else 1)\n"
    )
    return ["-c", code]
