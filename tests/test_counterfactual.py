"""Causes are interventions: with what a cause says to be different its own failures heal, and those of other causes do not."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from recorded import leaf, record
from seen import INF
from torch import Tensor

from nanscope.causes import Cause
from nanscope.replay.counterfactual import COUNTERFACTUALS
from nanscope.replay.tries import Bench

MASK = torch.tensor([[1.0, 1.0, 0.0], [1.0, 1.0, 1.0]])


class Failure(NamedTuple):
    """A loss that goes wrong by one cause. others: causes that would sound alike, and are not it."""

    cause: Cause
    loss: Callable[..., Tensor]
    leaves: Callable[[], tuple[Tensor, ...]]
    others: tuple[Cause, ...] = ()


def at(number: float, row: int = 0, column: int = 2, dtype: torch.dtype = torch.float32) -> Tensor:
    """Six numbers around 0.5, and one of them is another one."""
    found = torch.linspace(0.3, 0.7, 6).reshape(2, 3).to(dtype)
    found[row, column] = number
    return found.requires_grad_()


def counted(x: Tensor) -> Tensor:
    return (x * MASK).sum() / MASK.sum()


FAILURES = (
    Failure(Cause.EXP_OVERFLOW, lambda x: counted(x.exp()), lambda: (at(99.0, 1),), (Cause.INF_TIMES_ZERO_MASK,)),
    Failure(Cause.EXP_OVERFLOW, lambda x: (1e8**x).sum(), lambda: (at(50.0),)),
    Failure(Cause.SEQ_RATIO_OVERFLOW, lambda x: x.sum(-1).exp().sum(), lambda: (at(99.0),)),
    Failure(Cause.INF_TIMES_ZERO_MASK, lambda x: counted(x.exp()), lambda: (at(99.0),), (Cause.ZERO_DENOMINATOR,)),
    Failure(Cause.INF_TIMES_ZERO_MASK, lambda x: counted(x.log()), lambda: (at(0.0),)),
    Failure(Cause.INF_TIMES_ZERO_MASK, lambda x: counted(x.reciprocal()), lambda: (at(0.0),)),
    Failure(Cause.NAN_TIMES_ZERO_MASK, lambda x: counted(x.log()), lambda: (at(-1.0),)),
    Failure(Cause.INF_MINUS_INF, lambda x, y: (x - y).sum(), lambda: (at(INF), at(INF))),
    Failure(Cause.LOG_ZERO, lambda x: x.log().sum(), lambda: (at(0.0),), (Cause.INF_TIMES_ZERO_MASK, Cause.FP16_OVERFLOW)),
    Failure(Cause.LOG_ZERO, lambda x: x.log1p().sum(), lambda: (at(-1.0),)),
    Failure(Cause.PLOGP_ZERO, lambda x: (x * x.log()).sum(), lambda: (at(0.0),), (Cause.ZERO_DIV_ZERO,)),
    Failure(Cause.ZERO_DIV_ZERO, lambda x: (x / x).sum(), lambda: (at(0.0),), (Cause.EPS_UNDERFLOW,)),
    Failure(Cause.ZERO_DENOMINATOR, lambda x: (1 / x).sum(), lambda: (at(0.0),), (Cause.INF_TIMES_ZERO_MASK,)),
    Failure(Cause.ZERO_DENOMINATOR, lambda x: (x / 0.0).sum(), lambda: (at(0.3),)),
    Failure(Cause.EMPTY_MASK_MEAN, lambda x: x[x > 9].mean(), lambda: (leaf(2, 3),)),
    Failure(Cause.EMPTY_MASK_MEAN, lambda x: (x * 0 * MASK).sum() / (0 * MASK).sum(), lambda: (leaf(2, 3),)),
    Failure(Cause.STD_SINGLE, lambda x: x.std(-1).sum(), lambda: (leaf(2, 1),), (Cause.ZERO_DIV_ZERO,)),
    Failure(Cause.SQRT_ZERO_GRAD, lambda x: x.sqrt().sum(), lambda: (at(0.0),), (Cause.SEQ_RATIO_OVERFLOW,)),
    Failure(Cause.SQRT_NEGATIVE, lambda x: x.sqrt().sum(), lambda: (at(-0.1),)),
    Failure(Cause.SQRT_NEGATIVE, lambda x: ((-2.0) ** x).sum(), lambda: (at(0.5),)),
    Failure(Cause.FULLY_MASKED_SOFTMAX, lambda x: x.masked_fill(MASK < 2, -INF).softmax(-1).sum(), lambda: (leaf(2, 3),)),
    Failure(
        Cause.FP16_OVERFLOW,
        lambda x: (x * x).sum(),
        lambda: (at(300.0, dtype=torch.float16),),
        (Cause.ZERO_DENOMINATOR, Cause.EXP_OVERFLOW, Cause.INF_TIMES_ZERO_MASK),
    ),
    Failure(
        Cause.EPS_UNDERFLOW,
        lambda x: (1 / (x + 1e-8)).sum(),
        lambda: (at(0.0, dtype=torch.float16),),
        (Cause.FULLY_MASKED_SOFTMAX,),
    ),
    Failure(Cause.MAGNITUDE_OVERFLOW, lambda x: (x * x).sum(), lambda: (at(1e30),), (Cause.FP16_OVERFLOW, Cause.ZERO_DENOMINATOR)),
    Failure(Cause.MAGNITUDE_OVERFLOW, lambda x: (x * 1e30).sum(), lambda: (torch.tensor([1e30, -1e30, 1.0], requires_grad=True),)),
    Failure(Cause.BAD_INPUT, lambda x, y: (x * y).sum(), lambda: (leaf(2, 3), at(INF).detach()), (Cause.STD_SINGLE,)),
)


def bench(failure: Failure) -> Bench:
    return Bench.of(record(failure.loss, *failure.leaves()).snapshot())


def ids(failure: Failure) -> str:
    return str(failure.cause)


@pytest.mark.parametrize("failure", FAILURES, ids=ids)
def test_with_what_a_cause_says_its_failure_heals(failure: Failure) -> None:
    """Loss and gradients are finite, or what goes wrong next is another place."""
    row = bench(failure).without(failure.cause)
    assert row is not None
    assert row.works, row


@pytest.mark.parametrize("failure", [failure for failure in FAILURES if failure.others], ids=ids)
def test_with_what_another_cause_says_it_does_not(failure: Failure) -> None:
    """Either the change cannot be made of this origin, or it is made and does not help."""
    for other in failure.others:
        row = bench(failure).without(other)
        assert row is None or not row.works, row


def test_every_failure_that_a_file_can_hold_has_one() -> None:
    """A clip and another rank's NaN are no program, and unknown says nothing."""
    assert set(Cause) - set(COUNTERFACTUALS) == {Cause.INF_GRAD_NORM_CLIP, Cause.ALLREDUCE_NAN, Cause.UNKNOWN}


def test_a_step_that_is_tested_stays_as_it_was_recorded() -> None:
    """Whatever is tried, the tensors of the snapshot are those of the step."""
    snapshot = record(FAILURES[0].loss, *FAILURES[0].leaves()).snapshot()
    before = {value: tensor.clone() for value, tensor in snapshot.tensors.items()}
    tested = Bench.of(snapshot)
    for cause in COUNTERFACTUALS:
        tested.without(cause)
    assert all(torch.equal(tensor, before[value]) for value, tensor in snapshot.tensors.items())
