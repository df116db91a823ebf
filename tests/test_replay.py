"""Replays and edits: right fixes end healthy and leave healthy tokens alone, the tempting wrong ones are seen failing."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from recorded import leaf, record
from test_locate import CASES, Case, clipped, hole, logps_with, multiplied, selected
from torch import Tensor

from nanscope.errors import NanscopeError
from nanscope.program.program import Program
from nanscope.replay.edits import CONTROLS, EDITS, parse_edit
from nanscope.replay.tries import replay
from nanscope.verdict.diagnose import diagnose

BEST = {
    "a learned power": "clamp_input", "a learned scale": "mask_before_op",
    "mask multiplies": "mask_before_op", "integer mask": "mask_before_op", "boolean mask": "mask_before_op", "counted token": "clamp_exponent",
    "where after exp": "mask_before_op", "index after exp": "mask_before_op", "masked_fill after exp": "mask_before_op", "k3 masked": "mask_before_op",
    "k3 counted": "clamp_exponent", "min picks the clip": "clamp_exponent", "min picks inf": "clamp_exponent", "zero advantage": "clamp_exponent",
    "chunks": "mask_before_op", "sequence ratio": "clamp_exponent", "prefix ratio": "clamp_exponent", "transposed and flat": "clamp_exponent",
    "in-place mask": "mask_before_op", "slice assignment": "mask_before_op", "empty row": "clamp_denominator", "empty batch": "clamp_denominator",
    "log of 0": "clamp_input", "sqrt at 0": "avoid_singular_op", "difference of -inf": "drop_invalid_sample", "p log p": "stable_function",
    "fully masked softmax": "safe_softmax", "NaN in the batch, masked": "mask_before_op", "NaN in the rewards": "reject_input", "the first of two": "clamp_input", "infinite by decision": "skip_disabled_term",
    "-inf of the batch, twice": "reject_input",
}  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_the_best_fix_was_run_and_works(case: Case) -> None:
    """For every mechanism the first fix is of the right class, was executed, ends finite and leaves healthy elements alone."""
    recorded = record(case.loss, *case.args())
    incident = diagnose(recorded.snapshot())
    assert incident.reproduces is True
    best = incident.fixes[0]
    assert (best.id, best.executed, best.works) == (BEST[case.name], True, True)
    assert best.loss is not None and math.isfinite(best.loss)
    assert best.bad == 0
    if best.distortion is not None and case.name not in ("sequence ratio", "prefix ratio"):
        assert best.distortion < 1e-5
    assert all(fix.works for fix in incident.fixes if fix.executed)
    assert incident.sentence.endswith(".")


@pytest.mark.parametrize("name", ["where after exp", "index after exp", "mask multiplies", "min picks the clip"])
def test_the_tempting_fixes_fail(name: str) -> None:
    """Mending the result of exp repairs the loss and leaves the gradient NaN."""
    case = next(case for case in CASES if case.name == name)
    rows = {row.id: row for row in record(case.loss, *case.args()).replay().rows}
    for control in CONTROLS:
        assert math.isfinite(rows[control].loss or 0.0)
        assert rows[control].bad == 1 and not rows[control].works


def test_distortion_is_measured_on_healthy_tokens_only() -> None:
    """A clamp below the healthy log-ratios distorts them and is ranked behind the mask; a wide one does not."""
    logps = leaf(3, 5)
    old = logps.detach() - torch.linspace(0, 8, 15).reshape(3, 5)
    old[1, 3] = -200.0
    recorded = record(multiplied, logps, old, hole(1, 3))
    rows = {
        row.label: row
        for row in replay(recorded.snapshot(), [("clamp:2", parse_edit("clamp:2")), ("clamp:20", parse_edit("clamp:20"))]).rows
    }
    narrow = next(row for label, row in rows.items() if "±2 " in label)
    wide = next(row for label, row in rows.items() if "±20 " in label)
    assert narrow.works and wide.works
    assert narrow.distortion is not None and narrow.distortion > 0.1
    assert wide.distortion is not None and wide.distortion < 1e-6


def test_a_transient_fault_is_told_from_one_that_reproduces() -> None:
    """If the recorded loss does not come out again, the replay says so and finds nothing."""
    recorded = record(multiplied, *logps_with(1, 3, -1.0), hole(1, 3))
    replayed = replay(recorded.snapshot(loss=torch.tensor(math.nan)))
    assert replayed.reproduces is False and replayed.location is None
    assert replayed.rows[0].note == "does not reproduce"


def test_float64_reference_moves_every_dtype() -> None:
    """Casts in the recorded program do not bring the old precision back."""

    def loss(logps: Tensor, old: Tensor) -> Tensor:
        return torch.exp((logps.half() - old.half()).float()).mean()

    recorded = record(loss, leaf(3), torch.full((3,), -1.0))
    run = recorded.program.execute(recorded.tensors, dtype=torch.float64)
    assert all(value.dtype is torch.float64 for value in run.values.values() if value.is_floating_point())


def test_edits_by_name() -> None:
    """What a command line can ask for, and what it cannot."""
    for name in (*EDITS, *CONTROLS, "clamp", "mask", "clamp:20", "clamp_denominator:1e-8"):
        assert callable(parse_edit(name))
    for name in ("", "explode", "clamp:", "clamp:x", "clamp:-3", "mask:2", "clamp:1e", "clamp:.", "clamp:0", "clamp:1e400"):
        if name == "clamp:":
            continue
        with pytest.raises(NanscopeError):
            parse_edit(name)


def test_an_empty_program_replays_to_nothing() -> None:
    """A step whose loss was opaque has no rows and no verdict of its own."""
    recorded = record(multiplied, *logps_with(1, 3, -200.0), hole(1, 3))
    replayed = replay(recorded.snapshot(program=Program((), (), -1), tensors={}))
    assert replayed.rows == () and replayed.location is None and replayed.reproduces is None


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_dtypes(dtype: torch.dtype) -> None:
    """exp overflows where the dtype says, and the fix works there as well."""
    logps, old = (tensor.to(dtype) for tensor in logps_with(1, 3, -800.0))
    logps = logps.detach().requires_grad_()
    incident = diagnose(record(selected, logps, old, hole(1, 3)).snapshot())
    assert (incident.origin.op, incident.origin.index, incident.origin.dtype) == ("exp", (1, 3), str(dtype).removeprefix("torch."))
    assert incident.fixes[0].id == "mask_before_op" and incident.fixes[0].works


def test_all_tokens_overflow() -> None:
    """With nothing healthy left there is still a verdict and a fix."""
    logps = leaf(2, 3)
    incident = diagnose(record(clipped, logps, logps.detach() - 300.0, -torch.ones(2, 1)).snapshot())
    assert incident.fixes[0].id == "clamp_exponent"


def test_the_rows_are_a_frame() -> None:
    """One row per way of running the step, by its id."""
    case = next(case for case in CASES if case.name == "mask multiplies")
    replayed = record(case.loss, *case.args()).replay()
    found = replayed.frame()
    assert list(found.index) == [row.id for row in replayed.rows] and found.index.name == "id"
    assert found.loc["mask_before_op", "works"] and not found.loc["where_after_op", "works"]


def two_means(logps: Tensor, mask: Tensor, weight: Tensor) -> Tensor:
    kept = (mask * weight).sum(-1) / mask.sum(-1)
    seen = (mask * weight.square()).sum(-1) / mask.sum(-1)
    return (logps.mean(-1) * seen * kept).mean()


def two_means_with_gradient(logps: Tensor, mask: Tensor, weight: Tensor) -> Tensor:
    kept = (mask * weight).sum(-1) / mask.sum(-1)
    per_row = (mask * logps).sum(-1) / mask.sum(-1)
    return (per_row * kept).mean()


def two_faults(logps: Tensor, mask: Tensor, weight: Tensor) -> Tensor:
    kept = (mask * weight).sum(-1) / mask.sum(-1)
    scale = (weight.mean() - 0.5).log()
    return (logps.mean(-1) * scale * kept).mean()


@pytest.mark.parametrize(
    ("loss", "works"),
    [
        (two_means, {"where_after_op", "nan_to_num_after_op"}),  # data are mended, and no gradient goes through them
        (two_means_with_gradient, set()),
        (two_faults, {"where_after_op", "nan_to_num_after_op"}),  # that two edits heal
    ],
)
def test_a_tempting_fix_is_tried_at_all_places_of_the_fix(loss: Callable[..., Tensor], works: set[str]) -> None:
    """None of them fails for want of the second place, and what fails does so at both."""
    mask = torch.ones(3, 5)
    mask[1] = 0
    replayed = record(loss, leaf(3, 5), mask, torch.full((3, 5), 0.25)).replay()
    assert any(row.works for row in replayed.rows if row.kind == "fix")
    controls = {row.id: row for row in replayed.rows if row.kind == "control"}
    assert controls.keys() == CONTROLS.keys()
    assert {name for name, row in controls.items() if row.works} == works
    assert all("kept, after div; the same at line" in row.label for row in controls.values())


def test_an_exponent_in_half_precision_is_bounded_by_what_that_holds() -> None:
    """e^20 is no number of float16: a bound there has to be one that it can be raised to."""
    logps, old = (tensor.to(torch.float16) for tensor in logps_with(1, 3, -30.0))
    replayed = replay(record(clipped, logps.detach().requires_grad_(), old, -torch.ones(3, 1, dtype=torch.float16)).snapshot())
    row = next(row for row in replayed.rows if row.id == "clamp_exponent")
    assert row.works and "±10 " in row.label


def test_what_a_model_has_handed_over_bad_is_a_second_fault() -> None:
    """A `where` hides a NaN from the loss, and not from the backward of what made it: no fix of the other fault is proven."""

    def loss(handed: Tensor, old: Tensor, mask: Tensor) -> Tensor:
        ratio = torch.exp(handed - old)
        return torch.where(mask.bool(), ratio, 0.0).sum() / mask.sum()

    handed, old, mask = leaf(3, 5), torch.zeros(3, 5), hole(0, 2)
    old[2, 1] = -200.0
    for bad in (False, True):
        handed = handed.detach().clone()
        handed[0, 2] = math.nan if bad else -1.0
        rows = replay(record(loss, handed.requires_grad_(), old, mask).snapshot()).rows
        fixes = [row for row in rows if row.kind == "fix" and row.works]
        assert fixes and all(("a second fault" in row.cost) == bad and row.proven != bad for row in fixes), fixes


def test_what_stands_in_a_row_beside_an_overflow_is_not_healthy() -> None:
    """Under the logarithm of their sum nothing is left of the others: what they would have without it is nothing to hold a fix against."""

    def loss(logits: Tensor, labels: Tensor) -> Tensor:
        chosen = logits.gather(-1, labels)[..., 0]
        return -(chosen - logits.exp().sum(-1).log()).sum()

    logits = torch.randn(2, 3, 6)
    logits[1, 2] = torch.tensor([900.0, 80.0, 70.0, 3.0, 1.0, 0.0])
    rows = replay(record(loss, logits.requires_grad_(), torch.ones(2, 3, 1, dtype=torch.int64)).snapshot()).rows
    row = next(row for row in rows if row.id == "stable_function")
    assert row.works and row.distortion == 0.0 and "logsumexp" in row.label, row


def test_log_softmax_is_held_against_what_was_healthy() -> None:
    """Of a probability that is 0 even in float64 no gradient tells that it was computed of its token."""

    def loss(hidden: Tensor, weight: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
        probs = (hidden @ weight).softmax(-1)
        return -(probs.gather(-1, labels)[..., 0].log() * mask).sum() / mask.sum()

    hidden, weight = torch.randn(2, 4, 3), torch.randn(3, 5)
    hidden[0, 1] *= 4000.0
    rows = replay(
        record(
            loss, hidden.requires_grad_(), weight.requires_grad_(), torch.ones(2, 4, 1, dtype=torch.int64), hole(1, 3, (2, 4))
        ).snapshot()
    ).rows
    row = next(row for row in rows if row.id == "stable_function")
    assert row.works and row.distortion == 0.0 and "log_softmax" in row.label, row


def test_no_mask_is_put_over_a_token_that_it_keeps() -> None:
    """What multiplies a token by 1 leaves out none: to fill where it is 1 would fill every token that counts."""

    def loss(logps: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
        mean = (advantages * mask).sum() / mask.sum()
        variance = ((advantages - mean) ** 2 * mask).sum() / mask.sum()
        return -(logps * (advantages - mean) * torch.rsqrt(variance + 1e-8) * mask).sum() / mask.sum()

    advantages = torch.randn(3, 5)
    advantages[2, 0] = math.nan
    rows = replay(record(loss, leaf(3, 5), advantages, hole(0, 2)).snapshot()).rows
    assert "mask_before_op" not in {row.id for row in rows}, rows


def test_rows_that_were_shuffled_are_filled_where_the_mask_has_them() -> None:
    """As TRL shuffles a batch before its loss: the mask says of the rows as they are then which tokens it leaves out."""

    def loss(logps: Tensor, old: Tensor, mask: Tensor, order: Tensor) -> Tensor:
        kept = mask[order]
        return (torch.exp(logps - old[order]) * kept).sum() / kept.sum()

    order, mask, old = torch.tensor([2, 0, 1]), torch.ones(3, 5), torch.randn(3, 5)
    mask[0, 3:], mask[1, 1:], mask[2, 4:] = 0, 0, 0
    old[1, 3] = -math.inf
    logps = leaf(3, 5)
    rows = replay(record(loss, logps, old, mask, order).snapshot()).rows
    row = next(row for row in rows if row.id == "mask_before_op")
    true = loss(logps.detach(), old.masked_fill(mask == 0, 0.0), mask, order)
    assert row.proven and row.distortion == 0.0 and row.loss == pytest.approx(float(true)), row
