"""The atlas held against the functions of the frameworks that are installed here, cell by cell."""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from nanscope.atlas.cells import Atlas, Evaluated, Trials, harm_of
from nanscope.atlas.faults import Fault
from nanscope.atlas.harm import Harm
from nanscope.errors import NanscopeError
from nanscope.frameworks.losses import LOSSES
from nanscope.frameworks.paths import LossPath
from nanscope.native import installed, native_keys, native_loss
from nanscope.objective.settings import LossInputs


@dataclass(frozen=True, slots=True)
class Disagreement:
    """A cell in which a framework's own function answers otherwise than nanscope's objective."""

    path: LossPath
    fault: Fault
    ours: Harm
    theirs: Harm


@dataclass(frozen=True, slots=True)
class Compared:
    """How much of a framework was compared. version: the installed one; known: the one that nanscope's row was read in."""

    framework: str
    version: str
    known: str
    paths: int
    cells: int


@dataclass(frozen=True, slots=True)
class Verification:
    """An atlas held against the installed frameworks.

    refused:   cells in which the framework stops with an error of its own instead of a loss, and its words.
    unreached: paths that cannot be called from here although the framework is installed, and why.
    absent:    frameworks that are not installed, or that no adapter knows.

    Paths with a clamp that the framework does not have have nothing to be compared with; they are in none of these.
    """

    compared: tuple[Compared, ...]
    disagreements: tuple[Disagreement, ...]
    refused: tuple[tuple[LossPath, Fault, str], ...]
    unreached: tuple[tuple[LossPath, str], ...]
    absent: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """Return plain data."""
        return {
            "compared": [asdict(one) for one in self.compared],
            "disagreements": [
                {"path": d.path.name, "fault": d.fault.name, "ours": d.ours.code, "theirs": d.theirs.code} for d in self.disagreements
            ],
            "refused": [{"path": path.name, "fault": fault.name, "why": why} for path, fault, why in self.refused],
            "unreached": [{"path": path.name, "why": why} for path, why in self.unreached],
            "absent": self.absent,
        }


def verify(found: Atlas) -> Verification:
    """Recompute the cells of an atlas with the loss functions of the frameworks that are installed here."""
    trials, keys, versions = Trials.of(found.faults), set(native_keys()), installed()
    with _hushed(), torch.random.fork_rng(devices=()):
        theirs_of = {path: _theirs(path, trials) for path in found.paths if path.key in keys and not path.supposed}
    compared: dict[str, list[int]] = {}
    disagreements, refused, unreached = [], [], []
    for path, row in zip(found.paths, found.cells, strict=True):
        theirs = theirs_of.get(path)
        if theirs is None:
            continue
        if isinstance(theirs, str):
            unreached.append((path, theirs))
            continue
        answers = [(fault, ours, own) for fault, ours, own in zip(found.faults, row, theirs, strict=True)]
        refused += [(path, fault, own) for fault, _, own in answers if isinstance(own, str)]
        cells = [(fault, ours, own) for fault, ours, own in answers if isinstance(own, Harm)]
        disagreements += [Disagreement(path, fault, ours, own) for fault, ours, own in cells if ours != own]
        compared.setdefault(path.framework, []).append(len(cells))
    reached = {key.split(".")[0] for key in keys}
    return Verification(
        tuple(
            Compared(name, versions.get(name, "of unknown version"), _read_in(name), len(cells), sum(cells))
            for name, cells in compared.items()
        ),
        tuple(disagreements),
        tuple(refused),
        tuple(unreached),
        tuple(dict.fromkeys(path.framework for path in found.paths if path.framework not in reached)),
    )


def _read_in(framework: str) -> str:
    return next(row.version for row in LOSSES.values() if row.key.startswith(f"{framework}."))


def _theirs(path: LossPath, trials: Trials) -> list[Harm | str] | str:
    """Return what each fault does in the framework's own function, or its error; one line of why if even a healthy batch fails."""

    def native(path: LossPath, inputs: LossInputs) -> Tensor:
        return native_loss(path.key, inputs, **dict(path.settings))

    try:
        references = [Evaluated.of(path, inputs, native) for inputs in trials.references]
    except Exception as error:  # noqa: BLE001 - a framework runs anybody's code
        return _in_a_line(error)
    answers: list[Harm | str] = []
    for trial in trials.trials:
        try:
            answers.append(harm_of(trial.fault, trial.inputs, Evaluated.of(path, trial.inputs, native), references[trial.reference]))
        except Exception as error:  # noqa: BLE001
            answers.append(_in_a_line(error))
    return answers


def _in_a_line(error: Exception) -> str:
    words = " ".join(str(error).split())
    return words if isinstance(error, NanscopeError) else f"{type(error).__name__}: {words}"


@contextmanager
def _hushed() -> Iterator[None]:
    """Keep the frameworks from warning thousands of times of what was put into the batch on purpose."""
    before = logging.root.manager.disable
    loguru = getattr(sys.modules.get("loguru"), "logger", None)  # SkyRL logs with it
    try:
        logging.disable(logging.ERROR)
        if loguru is not None:
            loguru.disable("skyrl")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
        if loguru is not None:
            loguru.enable("skyrl")
