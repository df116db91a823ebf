"""The cells of the atlas: one forward and one backward pass of a loss path over a batch with one fault, by nanscope's own objective."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from nanscope.atlas.batch import FAULTY, faulty, healthy, reference
from nanscope.atlas.faults import FAULTS, LOG_RATIO, Fault, Where
from nanscope.atlas.harm import LEGEND, Harm
from nanscope.errors import NanscopeError
from nanscope.frameworks.losses import LOSSES, framework_loss
from nanscope.frameworks.paths import LossPath, paths
from nanscope.objective.settings import LossInputs
from nanscope.shown import Shown
from nanscope.text import count

if TYPE_CHECKING:
    import pandas

Evaluate = Callable[[LossPath, LossInputs], Tensor]


def evaluate(path: LossPath, inputs: LossInputs) -> Tensor:
    """Return the loss of a path on a batch by nanscope's own objective, a scalar with its gradient to the log-probs."""
    return framework_loss(path.key, inputs, **dict(path.settings)).loss


@dataclass(frozen=True, slots=True)
class Evaluated:
    """A loss, and its gradient to the log-probs, [B, T]."""

    loss: Tensor
    gradient_BT: Tensor

    @classmethod
    def of(cls, path: LossPath, inputs: LossInputs, evaluated: Evaluate) -> Evaluated:
        """Run a path on a batch, forward and backward."""
        torch.default_generator.manual_seed(0)  # clip_cov draws tokens; `torch.manual_seed` would cost as much as the loss
        loss = evaluated(path, inputs)
        (gradient_BT,) = torch.autograd.grad(loss, inputs.log_probs, allow_unused=True, materialize_grads=True)
        return cls(loss.detach().float(), gradient_BT.float())

    def like(self, other: Evaluated, counted_BT: Tensor) -> bool:
        """Return whether the losses and the gradients of the counted tokens are alike up to rounding."""
        close = torch.isclose(self.gradient_BT, other.gradient_BT, rtol=1e-5, atol=1e-7)
        return bool(torch.isclose(self.loss, other.loss, rtol=1e-5, atol=1e-7) & (close | ~counted_BT).all())


@dataclass(frozen=True, slots=True)
class Ready:
    """A fault ready to be run. reference: where, among the trials' references, the outcome is that it should have."""

    fault: Fault
    inputs: LossInputs
    reference: int


@dataclass(frozen=True, slots=True)
class Trials:
    """Faults with their batches, and the few healthy batches that they are held against; made once for all paths."""

    trials: tuple[Ready, ...]
    references: tuple[LossInputs, ...]

    @classmethod
    def of(cls, faults: Sequence[Fault]) -> Trials:
        """Make the batches of some faults."""
        known: dict[tuple[int, bool], LossInputs] = {}
        trials = []
        for fault in faults:
            about = (fault.advantage, fault.where is Where.ROW)
            known.setdefault(about, reference(fault))
            trials.append(Ready(fault, faulty(fault), list(known).index(about)))
        return cls(tuple(trials), tuple(known.values()))

    def run(self, path: LossPath, evaluated: Evaluate, skipped: frozenset[str] = frozenset()) -> tuple[Harm, ...]:
        """Return what each fault does on a path. skipped: tensors that this loss does not read; a fault in them does nothing."""
        references = [Evaluated.of(path, inputs, evaluated) for inputs in self.references]
        return tuple(
            Harm.CLEAN
            if trial.fault.tensor in skipped
            else harm_of(trial.fault, trial.inputs, Evaluated.of(path, trial.inputs, evaluated), references[trial.reference])
            for trial in self.trials
        )


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


def harm_of(fault: Fault, inputs: LossInputs, found: Evaluated, reference: Evaluated) -> Harm:
    """Return what a fault did. reference: the outcome that there should be."""
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


def _changed(fault: Fault, harm: Harm, counted_BT: Tensor, found: Evaluated, reference: Evaluated) -> bool:
    """Return whether a finite loss is not what it should be. At a counted token ±200 is a number like others: it may change the loss."""
    if Harm.LOSS in harm or Harm.VALID in harm:
        return False
    if fault.where is Where.BATCH:
        return bool(found.loss != 0)
    if fault.where is Where.VALID and fault.kind in LOG_RATIO:
        return False
    if fault.where is Where.ROW:
        found, counted_BT = Evaluated(found.loss, found.gradient_BT[FAULTY + 1 :]), counted_BT[FAULTY + 1 :]
    return not found.like(reference, counted_BT)


@dataclass(frozen=True, slots=True, repr=False)
class Atlas(Shown):
    """What every fault does on every path. cells: a row for each path, in it an entry for each fault."""

    paths: tuple[LossPath, ...]
    faults: tuple[Fault, ...]
    cells: tuple[tuple[Harm, ...], ...]

    def __str__(self) -> str:
        return f"{count(len(self.faults), 'fault')} on {count(len(self.paths), 'loss path')}"

    def cell(self, path: str, fault: str) -> Harm:
        """Return what the fault of one name does on the path of another."""
        row = [known.name for known in self.paths].index(path)
        return self.cells[row][[known.name for known in self.faults].index(fault)]

    def frame(self) -> pandas.DataFrame:
        """Return the atlas in long form as a pandas frame: one row per path and fault, `harm` in letters as in `LEGEND`."""
        import pandas

        rows = [
            (path.framework, path.key, path.name, fault.name, fault.tensor, str(fault.kind), str(fault.where), fault.advantage, harm.code)
            for path, row in zip(self.paths, self.cells, strict=True)
            for fault, harm in zip(self.faults, row, strict=True)
        ]
        columns = ["framework", "key", "path", "fault", "tensor", "kind", "where", "advantage", "harm"]
        return pandas.DataFrame(rows, columns=columns)

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
    trials = Trials.of(FAULTS if faults is None else faults)
    with torch.random.fork_rng(devices=()):
        cells = tuple(trials.run(path, evaluate, unread(path)) for path in chosen)
    return Atlas(chosen, tuple(trial.fault for trial in trials.trials), cells)
