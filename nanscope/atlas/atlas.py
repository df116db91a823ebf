"""The atlas of contamination: which fault reaches the loss, or the gradient, on which loss path of which framework.

    trl.dapo            old +200 at a masked token, A > 0   →  M     the loss is finite, the gradient of a padding token is NaN
    verl.vanilla        the same                            →  ·     the log-ratio is clamped before exp

Notable: nothing here is a stored table. Each cell is one forward and one backward pass of the framework's objective over a batch of three
rows into which one fault was put; `verify` runs the same cells through the functions of the frameworks that are installed.

Codes: `L` the loss is not finite, `V` a gradient at a counted token is not, `M` the gradient at a masked token is not, `≠` the loss is
finite and yet another number than it should be, `·` none of these. `M` is no trifle: the masked token's gradient flows into the same
weights as all others, so one step makes every parameter NaN while the loss still looks healthy.
"""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace
from enum import Flag, StrEnum, auto
from itertools import product
from typing import Any

import torch
from torch import Tensor

from nanscope.errors import NanscopeError
from nanscope.frameworks.losses import LOSSES, framework_loss
from nanscope.frameworks.paths import LossPath, paths
from nanscope.objective.settings import LossInputs


class Harm(Flag):
    """What a fault did. The empty flag is clean."""

    CLEAN = 0
    LOSS = auto()  # not finite
    CHANGED = auto()  # finite, and not what it should be
    VALID = auto()  # a gradient at a counted token is not finite
    MASKED = auto()  # a gradient at a masked token is not finite

    @property
    def code(self) -> str:
        """Return the letters, `·` for none."""
        return "".join(letter for harm, letter in LETTERS.items() if harm in self) or "·"

    @property
    def silent(self) -> bool:
        """Return whether the gradient is not finite although the loss is: a curve of the loss shows nothing."""
        return bool(self & GRADIENT) and Harm.LOSS not in self


LETTERS = {Harm.LOSS: "L", Harm.CHANGED: "≠", Harm.VALID: "V", Harm.MASKED: "M"}  # in the order in which they are written

GRADIENT = Harm.VALID | Harm.MASKED

LEGEND = {
    "·": "clean",
    "L": "the loss is not finite",
    "V": "a gradient at a counted token is not finite",
    "M": "the gradient at a masked token is not finite",
    "≠": "the loss is finite but wrong: a masked token or an empty row changed it, or a counted NaN or −inf vanished",
}


class Kind(StrEnum):
    """What is put into the batch."""

    NEGATIVE_INFINITY = "−inf"
    NAN = "NaN"
    PLUS = "+200"  # nat: the log-ratio that the tensor stands in; exp overflows above 88.72 in float32
    MINUS = "−200"
    EMPTY = "empty"  # no valid token


class Where(StrEnum):
    """Where it is put."""

    MASKED = "masked"
    VALID = "valid"
    ROW = "row"
    BATCH = "batch"


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault: a kind, at one place of one tensor, under one sign of the advantage.

    tensor:    field of `LossInputs`; the mask for rows and batches without a valid token.
    advantage: sign of A in the faulty row, 1, −1 or 0.
    """

    tensor: str
    kind: Kind
    where: Where
    advantage: int = 1

    @property
    def name(self) -> str:
        """Return `old +200 masked A>0`."""
        if self.kind is Kind.EMPTY:
            return f"empty {self.where}"
        return f"{SHORT[self.tensor]} {self.kind} {self.where} A{'<=>'[self.advantage + 1]}0"

    @property
    def sets(self) -> str:
        """Return what exactly is set in the batch."""
        if self.kind is Kind.EMPTY:
            return f"mask := 0 in {'the faulty row' if self.where is Where.ROW else 'every row'}"
        if self.kind not in _LOG_RATIO:
            return f"{self.tensor} := {self.kind}"
        base, sign, ratio = _STANDS_IN[self.tensor]
        step = "+" if sign * _LOG_RATIO[self.kind] > 0 else "−"
        return f"{self.tensor} := {base} {step} 200, so that {ratio} = {self.kind}"


SHORT = {
    "log_probs": "policy",
    "old_log_probs": "old",
    "ref_log_probs": "ref",
    "rollout_log_probs": "rollout",
    "entropy": "entropy",
    "mask": "mask",
}

_LOG_RATIO = {Kind.PLUS: 200.0, Kind.MINUS: -200.0}

_CONSTANT = {Kind.NEGATIVE_INFINITY: float("-inf"), Kind.NAN: float("nan")}


# tensor: (what it is set against, the sign with which it enters its log-ratio, that log-ratio)
_STANDS_IN = {
    "log_probs": ("old_log_probs", 1.0, "log_ratio = policy − old"),
    "old_log_probs": ("log_probs", -1.0, "log_ratio = policy − old"),
    "ref_log_probs": ("log_probs", 1.0, "ref − policy"),
    "rollout_log_probs": ("old_log_probs", -1.0, "old − rollout"),
}


FAULTS: tuple[Fault, ...] = (
    *(
        Fault(tensor, kind, where, sign)
        for where, tensor, kind, sign in product(
            (Where.MASKED, Where.VALID),
            _STANDS_IN,
            (Kind.NEGATIVE_INFINITY, Kind.NAN, Kind.PLUS, Kind.MINUS),
            (1, -1),
        )
    ),
    *(Fault("old_log_probs", Kind.PLUS, where, 0) for where in (Where.MASKED, Where.VALID)),  # a group whose rewards are all alike
    *(Fault("entropy", Kind.NAN, where) for where in (Where.MASKED, Where.VALID)),
    Fault("mask", Kind.EMPTY, Where.ROW),
    Fault("mask", Kind.EMPTY, Where.BATCH),
)


_FAULTY = 0  # the row that the fault is put into

_SPOT = {Where.MASKED: (_FAULTY, 3), Where.VALID: (_FAULTY, 1)}


def healthy(advantage: int = 1) -> LossInputs:
    """Return the batch of the atlas without a fault: [3, 4], float32; the last token of row 0 and half of row 1 are masked.

    advantage: A of row 0, where faults are put. Ratios are near 1, inside every clip and band. Masked tokens have log-probs of their own,
    as tokens of a tool have. A row is short, so that its mean of a log-ratio of 200 is 67, which exp survives in float32.
    """
    policy = torch.tensor([[-1.00, -0.50, -2.00, -0.70], [-0.30, -1.20, -0.90, -0.40], [-0.80, -0.60, -1.50, -1.10]])
    old = policy - torch.tensor([[0.06, -0.04, -0.05, 0.03], [0.05, -0.06, 0.02, 0.04], [-0.03, 0.05, 0.04, -0.02]])
    ref = policy + torch.tensor([[0.08, -0.09, -0.12, 0.05], [-0.07, 0.11, 0.04, -0.05], [0.06, -0.04, 0.09, 0.10]])
    rollout = old - torch.tensor([[0.02, 0.01, 0.03, -0.02], [0.01, 0.03, -0.01, 0.02], [0.02, -0.01, 0.02, 0.01]])
    mask = torch.tensor([[1.0, 1.0, 1.0, 0.0], [1.0, 1.0, 0.0, 0.0], [1.0, 1.0, 1.0, 1.0]])
    advantages = torch.tensor([float(advantage), -0.5, 0.7])
    return LossInputs(policy.requires_grad_(), old, ref, rollout, advantages, mask, entropy=torch.ones_like(mask))


def faulty(fault: Fault) -> LossInputs:
    """Return the batch with the fault in it."""
    batch = healthy(fault.advantage)
    if fault.where is Where.BATCH:
        return replace(batch, mask=torch.zeros_like(batch.mask))
    changed = _tensor(batch, fault.tensor).detach().clone()
    if fault.where is Where.ROW:
        changed[_FAULTY] = 0.0
    elif fault.kind in _CONSTANT:
        changed[_SPOT[fault.where]] = _CONSTANT[fault.kind]
    else:
        base, sign, _ = _STANDS_IN[fault.tensor]
        changed[_SPOT[fault.where]] = _tensor(batch, base).detach()[_SPOT[fault.where]] + sign * _LOG_RATIO[fault.kind]
    return replace(batch, **{fault.tensor: changed.requires_grad_(fault.tensor == "log_probs")})


def _tensor(inputs: LossInputs, name: str) -> Tensor:
    tensor: Tensor = getattr(inputs, name)
    return tensor


Evaluate = Callable[[LossPath, LossInputs], Tensor]


def evaluate(path: LossPath, inputs: LossInputs) -> Tensor:
    """Return the loss of a path on a batch by nanscope's own objective, a scalar with its gradient to the log-probs."""
    return framework_loss(path.key, inputs, **dict(path.settings)).loss


@dataclass(frozen=True, slots=True)
class Outcome:
    """A loss, and its gradient to the log-probs, [B, T]."""

    loss: Tensor
    gradient_BT: Tensor

    @classmethod
    def of(cls, path: LossPath, inputs: LossInputs, evaluated: Evaluate) -> Outcome:
        """Run a path on a batch, forward and backward."""
        torch.default_generator.manual_seed(0)  # clip_cov draws tokens; `torch.manual_seed` would cost as much as the loss
        loss = evaluated(path, inputs)
        (gradient_BT,) = torch.autograd.grad(loss, inputs.log_probs, allow_unused=True, materialize_grads=True)
        return cls(loss.detach().float(), gradient_BT.float())

    def like(self, other: Outcome, counted_BT: Tensor) -> bool:
        """Return whether the losses and the gradients of the counted tokens are alike up to rounding."""
        close = torch.isclose(self.gradient_BT, other.gradient_BT, rtol=1e-5, atol=1e-7)
        return bool(torch.isclose(self.loss, other.loss, rtol=1e-5, atol=1e-7) & (close | ~counted_BT).all())


@dataclass(frozen=True, slots=True)
class _Trial:
    """A fault ready to be run. reference: where, among the trials' references, the outcome is that it should have."""

    fault: Fault
    inputs: LossInputs
    reference: int


@dataclass(frozen=True, slots=True)
class _Trials:
    """Faults with their batches, and the few healthy batches that they are held against; made once for all paths."""

    trials: tuple[_Trial, ...]
    references: tuple[LossInputs, ...]

    @classmethod
    def of(cls, faults: Sequence[Fault]) -> _Trials:
        known: dict[tuple[int, bool], LossInputs] = {}
        trials = []
        for fault in faults:
            about = (fault.advantage, fault.where is Where.ROW)
            known.setdefault(about, _reference(fault))
            trials.append(_Trial(fault, faulty(fault), list(known).index(about)))
        return cls(tuple(trials), tuple(known.values()))

    def run(self, path: LossPath, evaluated: Evaluate, skipped: frozenset[str] = frozenset()) -> tuple[Harm, ...]:
        """Return what each fault does on a path. skipped: tensors that this loss does not read; a fault in them does nothing."""
        references = [Outcome.of(path, inputs, evaluated) for inputs in self.references]
        return tuple(
            Harm.CLEAN
            if trial.fault.tensor in skipped
            else _harm(trial.fault, trial.inputs, Outcome.of(path, trial.inputs, evaluated), references[trial.reference])
            for trial in self.trials
        )


def _reference(fault: Fault) -> LossInputs:
    """Return the batch whose loss the faulty one should have: a row without a valid token should count for nothing."""
    batch = healthy(fault.advantage)
    if fault.where is not Where.ROW:
        return batch
    others = slice(_FAULTY + 1, None)
    cut = {part.name: _tensor(batch, part.name).detach()[others] for part in fields(batch)}
    return LossInputs(**cut | {"log_probs": cut["log_probs"].requires_grad_()})


def unread(path: LossPath) -> frozenset[str]:
    """Return which of ref and rollout log-probs the objective of a path does without."""
    inputs = healthy()
    loss = evaluate(path, inputs)
    lacking = {"ref_log_probs": replace(inputs, ref_log_probs=None), "rollout_log_probs": replace(inputs, rollout_log_probs=None)}
    found = []
    for name, batch in lacking.items():
        try:
            without = evaluate(path, batch)
        except NanscopeError:  # a loss refuses a batch that lacks what it reads
            continue
        if torch.equal(without, loss):  # it has not taken another tensor instead
            found.append(name)
    return frozenset(found)


def _harm(fault: Fault, inputs: LossInputs, found: Outcome, reference: Outcome) -> Harm:
    counted_BT = inputs.mask > 0
    bad_BT = ~found.gradient_BT.isfinite()
    harm = Harm.CLEAN
    if not found.loss.isfinite():
        harm |= Harm.LOSS
    if (bad_BT & counted_BT).any():
        harm |= Harm.VALID
    if (bad_BT & ~counted_BT).any():
        harm |= Harm.MASKED
    return harm | Harm.CHANGED if _changed(fault, harm, counted_BT, found, reference) else harm


def _changed(fault: Fault, harm: Harm, counted_BT: Tensor, found: Outcome, reference: Outcome) -> bool:
    """Return whether a finite loss is not what it should be. At a counted token ±200 is a number like others: it may change the loss."""
    if Harm.LOSS in harm or Harm.VALID in harm:
        return False
    if fault.where is Where.BATCH:
        return bool(found.loss != 0)
    if fault.where is Where.VALID and fault.kind in _LOG_RATIO:
        return False
    if fault.where is Where.ROW:
        found, counted_BT = Outcome(found.loss, found.gradient_BT[_FAULTY + 1 :]), counted_BT[_FAULTY + 1 :]
    return not found.like(reference, counted_BT)


@dataclass(frozen=True, slots=True)
class Atlas:
    """What every fault does on every path. cells: a row for each path, in it an entry for each fault."""

    paths: tuple[LossPath, ...]
    faults: tuple[Fault, ...]
    cells: tuple[tuple[Harm, ...], ...]

    def cell(self, path: str, fault: str) -> Harm:
        """Return what the fault of one name does on the path of another."""
        row = [known.name for known in self.paths].index(path)
        return self.cells[row][[known.name for known in self.faults].index(fault)]

    def to_json(self) -> dict[str, Any]:
        """Return the atlas as plain data: a list of codes for each path, in the order of the faults."""
        return {
            "codes": LEGEND,
            "faults": [{"name": f.name, "tensor": f.tensor, "kind": f.kind, "where": f.where, "sets": f.sets} for f in self.faults],
            "paths": [
                {
                    "name": path.name,
                    "key": path.key,
                    "settings": dict(path.settings),
                    "version": LOSSES[path.key].version,
                    "site": LOSSES[path.key].site,
                    "supposed": path.supposed,
                    "cells": [harm.code for harm in row],
                }
                for path, row in zip(self.paths, self.cells, strict=True)
            ],
        }


def atlas(keys: Iterable[str] | None = None, faults: Sequence[Fault] | None = None) -> Atlas:
    """Compute the atlas.

    keys:   prefixes of the paths' names (`verl`, `trl.grpo`); None is all.
    faults: None is all of `FAULTS`.
    Raises NanscopeError for a prefix that no path has.
    """
    chosen = paths(keys)
    trials = _Trials.of(FAULTS if faults is None else faults)
    with torch.random.fork_rng(devices=()):
        cells = tuple(trials.run(path, evaluate, unread(path)) for path in chosen)
    return Atlas(chosen, tuple(trial.fault for trial in trials.trials), cells)


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
    from nanscope.native import installed, native_keys

    trials, keys, versions = _Trials.of(found.faults), set(native_keys()), installed()
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
        tuple(Compared(name, versions[name], _read_in(name), len(cells), sum(cells)) for name, cells in compared.items()),
        tuple(disagreements),
        tuple(refused),
        tuple(unreached),
        tuple(dict.fromkeys(path.framework for path in found.paths if path.framework not in reached)),
    )


def _read_in(framework: str) -> str:
    return next(row.version for row in LOSSES.values() if row.key.startswith(f"{framework}."))


def _theirs(path: LossPath, trials: _Trials) -> list[Harm | str] | str:
    """Return what each fault does in the framework's own function, or its error; one line of why if even a healthy batch fails."""
    from nanscope.native import native_loss

    def native(path: LossPath, inputs: LossInputs) -> Tensor:
        return native_loss(path.key, inputs, **dict(path.settings))

    try:
        references = [Outcome.of(path, inputs, native) for inputs in trials.references]
    except Exception as error:  # noqa: BLE001 - a framework runs anybody's code
        return _in_a_line(error)
    answers: list[Harm | str] = []
    for trial in trials.trials:
        try:
            answers.append(_harm(trial.fault, trial.inputs, Outcome.of(path, trial.inputs, native), references[trial.reference]))
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
