"""Every operator of torch's own test samples, as a loss whose first operand holds one number that does not belong there.

What torch computes bare says whether harm is done; what nanscope says of the same lines is held against it.
"""

from __future__ import annotations

import contextlib
import math
import sys
import unittest
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

import nanscope

FROZEN = "__allow_nonbracketed_mutation_flag"  # the import takes away from everybody the right to set a flag of a backend
SAMPLES = 3  # of one operator
PLANTED = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}  # what comes in
EXTREME = {"zero": 0.0, "minus": -1.0, "huge": 3e38, "-huge": -3e38, "tiny": 1e-42}  # what an operator itself may make something bad of


@dataclass(frozen=True, slots=True)
class Case:
    """One sample of an operator with a number planted. value: in the first element of the first leaf; everywhere: in all of them."""

    op: str
    variant: str
    sample: int
    plant: str
    everywhere: bool = False

    def __str__(self) -> str:
        name = f"{self.op}.{self.variant}" if self.variant else self.op
        return f"{name}-{self.sample}-{self.plant}{'-all' if self.everywhere else ''}"


@cache
def _operators() -> dict[tuple[str, str], Any]:
    known = sys.modules.setdefault(
        "expecttest", ModuleType("expecttest")
    )  # of torch's own test suite: a base class, and nothing of it is run
    known.TestCase = getattr(known, "TestCase", unittest.TestCase)  # type: ignore[attr-defined]
    allowed = getattr(torch.backends, FROZEN)
    try:
        from torch.testing._internal.common_methods_invocations import op_db
    finally:
        setattr(torch.backends, FROZEN, allowed)
    return {(op.name, op.variant_test_name): op for op in op_db if op.supports_autograd and op.supports_dtype(torch.float32, "cpu")}


def cases(plants: dict[str, float], *, everywhere: bool = False) -> list[Case]:
    """All that there are, in the order of torch's list."""
    return [Case(op, variant, sample, plant, everywhere) for op, variant in _operators() for sample in range(SAMPLES) for plant in plants]


@cache
def _samples(op: str, variant: str) -> list[Any]:
    torch.manual_seed(0)
    found: list[Any] = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for sample in _operators()[op, variant].sample_inputs("cpu", torch.float32, requires_grad=True):
            if any(_is_float(leaf) for leaf in _tensors(sample)):
                found.append(sample)
            if len(found) == SAMPLES:
                break
    return found


def _tensors(sample: Any) -> Iterator[Tensor]:
    return (leaf for leaf in tree_leaves((sample.input, sample.args, sample.kwargs)) if isinstance(leaf, Tensor))


def _is_float(tensor: Tensor) -> bool:
    return tensor.is_floating_point() and tensor.requires_grad and tensor.numel() > 0 and tensor.layout is torch.strided


def _prepared(case: Case) -> tuple[Any, Any, list[Tensor]] | None:
    """Copies of a sample's arguments with the number planted, and the leaves among them."""
    samples = _samples(case.op, case.variant)
    if case.sample >= len(samples):
        return None
    leaves: list[Tensor] = []

    def copied(thing: Any) -> Any:
        if not isinstance(thing, Tensor):
            return thing
        twin = thing.detach().clone()
        if _is_float(thing):
            if not leaves:
                number = {**PLANTED, **EXTREME}[case.plant]
                if twin.is_contiguous() and twin.dtype in (torch.float16, torch.float32, torch.float64):
                    given = twin.numpy().copy()  # what comes in was not made by torch: it would be told where
                    given.reshape(-1)[slice(None) if case.everywhere else slice(1)] = number
                    twin = torch.tensor(given)
                else:
                    twin.fill_(number) if case.everywhere else twin[(0,) * twin.dim()].fill_(number)
            leaves.append(twin.requires_grad_())
        return twin

    sample = samples[case.sample]
    arguments = tree_map(copied, (sample.input, *sample.args)), tree_map(copied, sample.kwargs)
    return (*arguments, leaves)


def _run(case: Case) -> list[Tensor] | None:
    """Loss and gradients; None if there is nothing to differentiate."""
    prepared = _prepared(case)
    if prepared is None:
        return None
    args, kwargs, leaves = prepared
    torch.manual_seed(1)
    made = _operators()[case.op, case.variant].op(*args, **kwargs)
    made = [one for one in tree_leaves(made) if isinstance(one, Tensor) and one.requires_grad and one.layout is torch.strided]
    if not made:
        return None
    losses = [(one.abs() if one.is_complex() else one).float().sum() for one in made]
    loss = losses[0] if len(losses) == 1 else torch.stack(losses).sum()
    loss.backward()  # type: ignore[no-untyped-call]
    return [loss.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What was said of a case where harm is done."""

    case: Case
    verdict: nanscope.Verdict
    identical: bool

    @property
    def missed(self) -> bool:
        return self.verdict.healthy

    @property
    def op(self) -> str:
        return self.verdict.incidents[0].origin.op

    @property
    def came_in(self) -> bool:
        """Is the number told that was planted, whatever the cause is called?"""
        return self.verdict.incidents[0].phase == "input"

    @property
    def unknown(self) -> bool:
        return not self.missed and str(self.verdict.incidents[0].cause) == "unknown"


def outcome(case: Case, folder: Path) -> Outcome | None:
    """None where bare torch does no harm, or refuses."""
    with warnings.catch_warnings(), contextlib.suppress(Exception):
        warnings.simplefilter("ignore")
        bare = _run(case)
        if bare is None or all(bool(torch.isfinite(one).all()) for one in bare):
            return None
        with nanscope.watch(out=folder) as scope:
            watched = _run(case)
        same = watched is not None and all(torch.equal(a.nan_to_num(7.5), b.nan_to_num(7.5)) for a, b in zip(bare, watched, strict=True))
        return Outcome(case, scope.verdict, same)
    return None
