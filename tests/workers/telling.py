"""What was said of runs that are trained bare and watched, as one line of JSON each: what every driver here prints.

A driver is a process of its own: `python DRIVER OUT NAME…` trains each of its cases that is named, all without a name. How a case is trained
stands in the driver and in `harness.py` (the workers of RL frameworks) or `trained.py` (trainers).
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import hashlib
import json
import os
import sys
import traceback
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch
from torch import Tensor

import nanscope

STEPS, BAD = 3, 2  # the step that a fault spoils


@dataclass(frozen=True, slots=True)
class Case:
    """One run. fault: as the driver plants it. settings: as the framework takes them. framework, entry: where they are not those of the driver."""

    name: str
    fault: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    framework: str = ""
    entry: str = ""


@dataclass(frozen=True, slots=True)
class Ran:
    """One training run. scope: None if it was bare. left: what it left, bit for bit. harm: what each step did, by the bare run's own count: gradients and weights
    that are not finite, and all.

    error: what the trainer raised, "" if it ended.
    """

    scope: nanscope.Scope | None
    left: str
    harm: dict[str, dict[str, list[int]]] = field(default_factory=dict)
    error: str = ""


Train = Callable[[Case, Path, bool], Ran]  # the case, where its files go, is it watched?


@dataclass(frozen=True, slots=True)
class Told:
    """What was said of a run, as JSON has it."""

    name: str
    framework: str
    version: str
    entry: str
    ranks: int
    status: str
    steps: int
    sentence: str
    gaps: list[str]
    notes: list[str]
    incidents: list[dict[str, Any]]
    log: list[str]
    same: bool
    harm: dict[str, dict[str, list[int]]]
    error: str


def told(train: Train, case: Case, out: Path, framework: str, entry: str, ranks: int = 1) -> Told:
    """Train one case bare and watched, and return what was said."""
    bare = train(case, out, False)
    ran = train(case, out / "".join(letter if letter.isalnum() else "-" for letter in case.name), True)
    scope = ran.scope
    assert scope is not None
    verdict = scope.verdict
    incidents = [
        {
            "step": i.step, "micro_batch": i.micro_batch, "rank": i.rank, "phase": i.phase, "cause": str(i.cause), "sentence": i.sentence, "op": i.origin.op,
            "variable": i.origin.variable, "role": i.origin.role, "index": list(i.origin.index), "masked": i.origin.masked,
            "file": i.origin.file, "line": i.origin.line, "function": i.origin.function, "module": i.origin.module,
            "framework": i.framework, "remedies": list(i.remedies), "consequence_of": i.consequence_of, "objective": i.objective.get("key"),
            "reproduces": i.reproduces, "fixes": [f.label for f in i.fixes if f.proven], "reached": i.reached,
        }
        for i in verdict.incidents
    ]  # fmt: skip
    return Told(
        case.name, case.framework or framework, version_of(case.framework or framework), case.entry or entry, ranks, str(verdict.status), scope.steps,
        verdict.sentence, [f"{gap.slug}: {gap.text}" for gap in verdict.gaps], [f"{note.slug}: {note.text}" for note in verdict.notes], incidents, [],
        (bare.left, bare.error) == (ran.left, ran.error), bare.harm, ran.error,
    )  # fmt: skip


def version_of(framework: str) -> str:
    """Return the release that is installed, or the revision of a checkout that NANSCOPE_<NAME>_VERSION tells."""
    named = os.environ.get(f"NANSCOPE_{framework.upper()}_VERSION", "")
    with contextlib.suppress(metadata.PackageNotFoundError):
        return named or metadata.version(framework)
    return named


def bits(tensors: Iterable[Tensor]) -> str:
    """Return what tensors hold, and how far the generator has come: equal for runs that are the same bit for bit."""
    held = hashlib.sha256()
    for tensor in (*tensors, torch.get_rng_state()):
        held.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return held.hexdigest()


def tell(train: Train, cases: Iterable[Case], framework: str, entry: str) -> None:
    """Print what is told of each case that the command line names."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    gc.freeze()  # trainers ask for many collections of garbage: what was imported need not be gone through by each
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    out, *names = sys.argv[1:]
    for case in cases:
        if not names or case.name in names:
            try:
                line: dict[str, Any] = dataclasses.asdict(told(train, case, Path(out), framework, entry, ranks))
            except Exception:
                line = {"name": case.name, "failed": traceback.format_exc()}
            print(json.dumps(line), flush=True)
