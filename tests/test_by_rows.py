"""Running by rows: the same numbers as the whole batch gives, and a verdict that does not know the difference."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from recorded import leaf, record
from test_locate import CASES, Case
from torch import Tensor

import nanscope.program.by_rows
import nanscope.program.run
from nanscope.program.by_rows import execute_by_rows
from nanscope.program.calls import Call
from nanscope.program.perform import perform
from nanscope.program.shelf import LEAST, Shelf
from nanscope.verdict.diagnose import diagnose

Loss = Callable[..., Tensor]
B, T = 7, 5


def grpo(logps: Tensor, old: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    ratio = torch.exp(logps - old)
    loss = -torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
    return (loss * mask).sum() / mask.sum().clamp(min=1)


def row_mean(logps: Tensor, old: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    ratio = torch.exp(logps - old)
    return -((ratio * advantages * mask).sum(1) / mask.sum(1).clamp(min=1)).mean()


def token_mean(logps: Tensor, old: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    return (-torch.exp(logps - old) * advantages * mask).mean()


def sequence_ratio(logps: Tensor, old: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    ratio = torch.exp(((logps - old) * mask).sum(-1, keepdim=True) / mask.sum(-1, keepdim=True).clamp(min=1))
    return -(ratio.expand(B, T) * advantages).mean()


def whitened(logps: Tensor, old: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    own = logps - old
    centred = own - (own * mask).sum() / mask.sum()
    scaled = centred / ((centred.square() * mask).sum() / mask.sum()).sqrt()
    return (scaled * advantages * torch.where(mask > 0, scaled, 0.0)).sum(0).sum()


def padded(logps: Tensor, old: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    kept = logps[:, 1:] - old[:, :-1]
    along = torch.softmax(kept, dim=-1).cumsum(-1)
    return (along.unsqueeze(-1).reshape(B, -1) * advantages.masked_fill(mask[:, :1] == 0, 0.0)).mean() + torch.zeros_like(logps).sum()


def stopped(logps: Tensor, old: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    scale = (logps.detach() * mask).sum()
    return (torch.exp(logps - logps.detach()) * advantages * mask).sum() / scale


SEPARABLE: tuple[Loss, ...] = (grpo, row_mean, token_mean, sequence_ratio, whitened, padded, stopped)


def across(logps: Tensor, old: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    return (logps.cumsum(0) - old).mean()


def shuffled(logps: Tensor, old: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    return (logps.flip(0) * advantages).sum() / mask.sum()


def flat(logps: Tensor, old: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    return (logps.reshape(-1) * mask.reshape(-1)).sum()


def selected(logps: Tensor, old: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    return logps[mask.bool()].mean()


def largest(logps: Tensor, old: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    return logps.max() + (old * mask).sum()


MIXED: tuple[Loss, ...] = (across, shuffled, flat, selected, largest)


def batch() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    torch.manual_seed(3)
    mask = (torch.rand(B, T) > 0.3).float()
    mask[2] = 0
    return leaf(B, T), -torch.rand(B, T), torch.randn(B, 1), mask


@pytest.mark.parametrize("at_once", [1, 10, 10_000])
@pytest.mark.parametrize("dtype", [None, torch.float64], ids=str)
@pytest.mark.parametrize("loss", SEPARABLE, ids=lambda loss: loss.__name__)
def test_rows_give_what_the_batch_gives(loss: Loss, dtype: torch.dtype | None, at_once: int) -> None:
    """Loss and gradients agree within rounding, for any number of rows at a time."""
    recorded = record(loss, *batch())
    whole = recorded.program.execute(recorded.tensors, dtype=dtype, ends=True)
    found = execute_by_rows(recorded.program, recorded.tensors, dtype, at_once)
    assert found is not None
    out = recorded.program.output
    torch.testing.assert_close(found.values[out], whole.values[out], equal_nan=True)
    assert set(found.grads) == set(whole.grads)
    for value, grad in whole.grads.items():
        assert found.grads[value].dtype is grad.dtype
        torch.testing.assert_close(found.grads[value], grad, equal_nan=True)


@pytest.mark.parametrize(("loss", "times"), [(token_mean, 1), (row_mean, 2), (grpo, 2)])
def test_rows_whose_sum_is_the_loss_are_computed_once(loss: Loss, times: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its gradient is 1, so that backward goes along; where something is done with the sum they are computed again."""
    recorded = record(loss, *batch())
    done: list[str] = []

    def counted(call: Call, *args: Any, **options: Any) -> list[Any]:
        done.append(call.name)
        return perform(call, *args, **options)

    monkeypatch.setattr(nanscope.program.by_rows, "perform", counted)
    assert execute_by_rows(recorded.program, recorded.tensors, None, 1) is not None
    assert done.count("exp") == 1 + times * B  # once without content, to plan it


@pytest.mark.parametrize("loss", MIXED, ids=lambda loss: loss.__name__)
def test_rows_that_meet_otherwise_are_not_taken_apart(loss: Loss) -> None:
    """Whoever sorts, flips or flattens the rows is run as a whole."""
    recorded = record(loss, *batch())
    assert execute_by_rows(recorded.program, recorded.tensors) is None


def test_most_losses_can_be_taken_apart() -> None:
    """What people write is pointwise along the rows: of the cases of the locator at least half."""
    found = [record(case.loss, *case.args()) for case in CASES]
    apart = [execute_by_rows(recorded.program, recorded.tensors) is not None for recorded in found]
    assert sum(apart) >= len(apart) / 2, [case.name for case, ok in zip(CASES, apart, strict=True) if not ok]


@given(st.integers(0, B - 1), st.integers(0, T - 1), st.sampled_from([-math.inf, math.inf, math.nan, 200.0, -200.0]), st.integers(0, 2))
@settings(max_examples=40, deadline=None)
def test_a_fault_contaminates_the_same_elements(row: int, column: int, fault: float, which: int) -> None:
    """NaN and Inf reach the same elements of the gradient by rows as in the whole batch."""
    for loss in (grpo, row_mean, sequence_ratio):
        tensors = batch()
        with torch.no_grad():
            tensors[which][row, column if tensors[which].shape[1] > 1 else 0] = fault
        recorded = record(loss, *tensors)
        whole = recorded.program.execute(recorded.tensors, ends=True)
        found = execute_by_rows(recorded.program, recorded.tensors, None, 10)
        assert found is not None
        for value, grad in whole.grads.items():
            torch.testing.assert_close(found.grads[value], grad, equal_nan=True)


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_a_large_step_is_diagnosed_like_a_small_one(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """With every value on the shelf and every fix run by rows the verdict is the same."""
    recorded = record(case.loss, *case.args())
    plain = diagnose(recorded.snapshot())
    assert LEAST > 1 << 20
    monkeypatch.setattr(nanscope.program.run, "Shelf", lambda: Shelf(least=1))
    monkeypatch.setattr(nanscope.program.by_rows, "LARGE", 0)
    monkeypatch.setattr(nanscope.program.by_rows, "AT_ONCE", 8)
    large = diagnose(recorded.snapshot())
    rounded = [replace(fix, loss=None, distortion=None) for fix in plain.fixes]
    assert [replace(fix, loss=None, distortion=None) for fix in large.fixes] == rounded
    for one, other in zip(plain.fixes, large.fixes, strict=True):
        assert one.loss == pytest.approx(other.loss, rel=1e-5, abs=1e-6, nan_ok=True)
        assert (one.distortion or 0.0) == pytest.approx(other.distortion or 0.0, abs=1e-5)
    assert json.dumps([str(large.origin), str(large.chain), large.sentence, large.reproduces]) == json.dumps(
        [str(plain.origin), str(plain.chain), plain.sentence, plain.reproduces]
    )
