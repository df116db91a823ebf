"""What an edit is held against: which elements are healthy, and what changes them."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from recorded import record
from torch import Tensor

import nanscope
from nanscope.causes import OF_A_BATCH
from nanscope.replay.edits import EDITS, clamp_exponent
from nanscope.replay.tries import Bench, Edit, replay
from nanscope.report.tried import best_of
from nanscope.snapshot.observation import Row
from nanscope.text import is_exact

INF, NAN = math.inf, math.nan


def rows_of(loss: Callable[..., Tensor], *tensors: Tensor, edits: tuple[tuple[str, Edit], ...] = ()) -> dict[str, Row]:
    found = record(loss, *tensors)
    return {row.id: row for row in replay(found.snapshot(), edits).rows}


def leaf(*rows: list[float]) -> Tensor:
    return torch.tensor(rows).requires_grad_()


def weighted(log_probs: Tensor, gaps: Tensor) -> Tensor:
    """A weight for a whole row, computed without gradients: the row's other tokens are as bad as the one that overflowed."""
    return -(torch.exp(gaps.sum(-1, keepdim=True)).detach() * log_probs).mean()


def test_the_rest_of_a_bad_row_is_not_healthy() -> None:
    """A clamp of its weight leaves all other rows alone, and its own row has no healthy gradient to compare with."""
    row = rows_of(weighted, leaf([0.1, 0.2], [0.3, 0.4], [0.5, 0.6]), torch.tensor([[0.1, 0.2], [80.0, 80.0], [1.0, 2.0]]))[
        "clamp_exponent"
    ]
    assert row.works and row.distortion == 0.0 and row.proven


def test_a_healthy_token_that_is_clamped_away_is_told() -> None:
    """Its gradient is 0 and should be the largest of all: changed by 100 %, and not proven."""

    def loss(x: Tensor, mask: Tensor) -> Tensor:
        return (torch.exp(x) * mask).sum()

    tight = (("tight", lambda patch: clamp_exponent(patch, 1.0)),)
    rows = rows_of(loss, leaf([0.5, 3.0, 99.0]), torch.tensor([[1.0, 1.0, 0.0]]), edits=tight)
    assert rows["mask_before_op"].proven and rows["mask_before_op"].distortion == 0.0
    replayed = record(loss, leaf([0.5, 3.0, 99.0]), torch.tensor([[1.0, 1.0, 0.0]]))
    found = [row for row in replay(replayed.snapshot(), tight).rows if row.kind == "asked"]
    assert [(row.works, row.distortion, row.proven) for row in found] == [(True, 1.0, False)]


def test_an_infinity_that_stands_there_on_purpose_is_left_in_the_reference() -> None:
    """A row that is masked altogether is the fault; what a mask excludes in the healthy rows is none."""

    def loss(logits: Tensor, mask: Tensor) -> Tensor:
        return torch.log_softmax(logits.masked_fill(mask, -INF), -1).exp().square().sum()

    mask = torch.tensor([[True, False, False], [True, True, True]])
    row = rows_of(loss, leaf([1.0, 2.0, 3.0], [1.0, 2.0, 3.0]), mask)["finite_mask_fill"]
    assert row.works and row.proven and row.distortion == 0.0


def test_a_filter_that_would_let_the_neutral_number_in_is_no_distortion() -> None:
    """The overflowed weight is filtered out; in float64, too, and that is what a clamp is held against."""

    def loss(x: Tensor, gaps: Tensor) -> Tensor:
        weight = torch.exp(gaps)
        return (weight * (weight < 3) * x).sum() / (weight < 3).sum()

    row = rows_of(loss, leaf([1.0, 2.0, 3.0]), torch.tensor([[0.5, 0.7, 99.0]]))["clamp_exponent"]
    assert row.works and row.proven and is_exact(row.distortion)


def test_a_layer_behind_another_is_looked_at_with_that_mended() -> None:
    """The padding has a row of no score in both layers; what its NaN had made of the second layer's other rows is no fault of theirs."""

    def loss(x: Tensor, bias: Tensor, mask: Tensor) -> Tensor:
        for _ in range(2):
            x = x + torch.softmax(x @ x.transpose(-1, -2) + bias, -1) @ x
        return (x.square().sum(-1) * mask).sum()

    keep = torch.tensor([[1.0, 1.0, 1.0], [0.0, 1.0, 1.0]])
    seen = torch.ones(3, 3).tril().bool() & keep[:, None].bool()
    x, bias = torch.rand(2, 3, 2).requires_grad_(), torch.where(seen, 0.0, -INF)
    rows = rows_of(loss, x, bias, keep)
    assert rows["safe_softmax"].proven and rows["finite_mask_fill"].proven
    (wanted,) = torch.autograd.grad(loss(x, bias.clamp(min=-1e30), keep), x)
    healthy = Bench.of(record(loss, x, bias, keep).snapshot()).healthy
    assert healthy is not None
    assert torch.allclose(healthy.grads[0].float()[keep.bool()], wanted[keep.bool()], rtol=1e-4)


def test_what_an_element_is_computed_from_by_a_function_that_is_flat_there_is_not_healthy() -> None:
    """Of a saturated tanh the stable form has the gradient that a bound has not; neither changes another element."""

    def loss(x: Tensor) -> Tensor:
        return -torch.log(1 - torch.tanh(x).pow(2)).mean()

    rows = rows_of(loss, leaf([0.1, 0.4, 300.0, -0.7]))
    assert [rows[edit].distortion for edit in ("stable_function", "clamp_input")] == [0.0, 0.0]


def test_that_a_row_adds_up_to_one_makes_nothing_healthy() -> None:
    """A pad that all rows share: whatever the weights of a row without a score, they add up to 1, unless they are 0."""

    def loss(pad: Tensor, scores: Tensor, bias: Tensor) -> Tensor:
        return (torch.softmax(scores + bias, -1) @ pad.expand(3, 2)).square().sum()

    bias = torch.zeros(2, 3)
    bias[1] = -INF
    rows = rows_of(loss, leaf([0.3, 0.5]), torch.rand(2, 3).requires_grad_(), bias)
    assert rows["safe_softmax"].works and rows["safe_softmax"].distortion in (0.0, None)


def test_what_comes_of_a_second_fault_is_not_healthy() -> None:
    """The same scale is divided by, too: where it was 0 a bound leaves a huge gradient, and no other."""

    def loss(mean: Tensor, x: Tensor, scale: Tensor) -> Tensor:
        return (torch.log(scale) + (x - mean).square() / scale.square()).mean()

    row = rows_of(loss, leaf([0.1, 0.2, 0.3]), torch.tensor([[0.5, 0.4, 0.2]]), torch.tensor([[1.0, 0.0, 2.0]]))["clamp_input"]
    assert row.works and row.distortion == 0.0


def test_what_has_no_gradient_measures_nothing() -> None:
    """Every element that the loss reads is divided by the 0, and beside them stands one that it does not read."""
    row = rows_of(lambda x, tau: (x[:, :-1] / tau).exp().mean(), leaf([0.1, 0.2, 0.3]), torch.tensor(0.0))["clamp_denominator"]
    assert row.distortion is None and not row.proven


def test_where_nothing_is_healthy_nothing_is_measured() -> None:
    """Every token is divided by the one deviation that is NaN: the edit heals, and nobody can say that it changes nothing."""
    row = rows_of(lambda x: ((x - x.mean()) / (x.mean(-1).std() + 1e-4)).sum(), leaf([1.0, 2.0]))["guard_small_group"]
    assert row.works and row.distortion is None and not row.proven


def test_elements_that_no_reference_heals_are_left_out_and_the_others_measured() -> None:
    """A group of equal rewards is 0/0 however it is neutralised; the groups beside it are healthy."""

    def loss(x: Tensor) -> Tensor:
        return ((x - x.mean(-1, keepdim=True)) / x.std(-1, keepdim=True)).square().mul(torch.arange(3.0)).sum()

    row = rows_of(loss, leaf([1.0, 1.0, 1.0], [1.0, 2.0, 4.0]))["clamp_denominator"]
    assert row.works and row.proven


def test_half_precision_is_held_against_what_the_formula_gives() -> None:
    """A product that overflows in float16 and not in float64: computing it in float32 is right, and measured."""
    x = torch.full((2, 2), 300.0, dtype=torch.float16).requires_grad_()
    row = rows_of(lambda x: (x @ x).float().mul(1e-5).mean(), x)["upcast_fp32"]
    assert row.works and row.proven and row.distortion is not None and row.distortion < 1e-2


@pytest.mark.parametrize(("factors", "proven"), [([0.0, 1.0], True), ([0.0, 0.0], False)], ids=["one element", "all of them"])
def test_an_update_has_no_samples_and_no_tick_without_a_measure(factors: list[float], proven: bool, tmp_path: Path) -> None:
    """AdamW with eps = 0 and a gradient of 0: a small epsilon helps, proven where another element shows that it changes nothing."""
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.AdamW([weight], lr=1e-3, eps=0.0, foreach=False)
    with nanscope.watch(out=tmp_path) as scope:
        (weight * torch.tensor(factors)).sum().backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    (incident,) = scope.verdict.incidents
    assert incident.phase == "optimizer"
    offered = {row.id: row for row in incident.rows if row.kind == "fix"}
    assert offered.keys() <= EDITS.keys() - OF_A_BATCH
    assert offered["clamp_denominator"].works and offered["clamp_denominator"].proven is proven
    assert "at least 1e-" in offered["clamp_denominator"].label  # a root is no count
    assert (best_of(incident) is not None) is proven
