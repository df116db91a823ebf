"""The proven edit of a bad step and its gradient: bad elements lose their own part, all others keep theirs."""

from __future__ import annotations

import math

import pytest
import torch
from recorded import leaf, record
from test_locate import CASES, Case
from test_replay import BEST
from torch import Tensor

from nanscope.replay.edits import mask_before_op
from nanscope.replay.tries import Bench
from nanscope.verdict.proof import prove

UNPROVEN = ("NaN in the rewards",)  # all tokens depend on it: nothing is healthy


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_every_mechanism_has_a_proof_that_is_finite_and_not_steep(case: Case) -> None:
    """Of the class that a report puts first; no gradient is made up that is larger than those of one element of a loss."""
    proof = prove(record(case.loss, *case.args()).snapshot(), {})
    if case.name in UNPROVEN:
        assert proof is None
        return
    assert proof is not None and proof.row.id == BEST[case.name] and 0 < proof.bad <= proof.size
    assert all(bool(grad.isfinite().all()) and float(grad.abs().max()) < 10 for grad in proof.grads.values())
    assert proof.row.distortion is not None or not any(bool(grad.any()) for grad in proof.grads.values())


def by_norm(x: Tensor) -> Tensor:
    return torch.sqrt(x.square().sum(-1)).sum()


def test_an_element_off_a_singular_point_has_no_gradient_of_its_own() -> None:
    """The derivative of a root beside 0 is as steep as the number that is added; the row at 0 gets none, the others keep theirs."""
    x = torch.tensor([[3.0, 4.0], [0.0, 0.0]], requires_grad=True)
    proof = prove(record(by_norm, x).snapshot(), {})
    assert proof is not None and proof.row.id == "avoid_singular_op"
    (gradient,) = proof.grads.values()
    assert torch.allclose(gradient, torch.tensor([[0.6, 0.8], [0.0, 0.0]]))


def surrogate(log_probs: Tensor, old: Tensor, mask: Tensor) -> Tensor:
    ratio = torch.exp(log_probs - old)
    return -(ratio * mask).sum() / mask.sum() + 0.1 * log_probs.square().mean()


def batch() -> tuple[Tensor, Tensor, Tensor]:
    log_probs, mask = leaf(3, 5), torch.ones(3, 5)
    mask[1, 2:] = 0
    return log_probs, log_probs.detach().clone(), mask


def test_a_bad_entry_of_the_batch_is_filled_in_and_left_out() -> None:
    """Of a token with an unknown old log-prob nothing is learnt, whatever number stands in for it."""
    log_probs, old, mask = batch()
    old[2, 1] = math.nan
    proof = prove(record(surrogate, log_probs, old, mask).snapshot(), {})
    assert proof is not None and proof.row.id == "reject_input"
    (gradient,) = proof.grads.values()
    known = torch.ones(3, 5, dtype=torch.bool)
    known[2, 1] = False
    old[2, 1] = 0.0
    (wanted,) = torch.autograd.grad(surrogate(log_probs, old, mask), log_probs)
    assert torch.equal(gradient[known], wanted[known]) and gradient[2, 1] == 0


def test_what_a_model_handed_over_is_not_mended() -> None:
    """A log-prob that came in as NaN, though masked: the model's backward would go on with it."""
    log_probs, old, mask = batch()
    with torch.no_grad():
        log_probs[1, 3] = math.nan
    assert prove(record(surrogate, log_probs, old, mask).snapshot(), {}) is None


def test_an_edit_that_was_proven_before_is_tried_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of an origin that is known: the others cost more than a step."""
    log_probs, old, mask = batch()
    old[1, 3] = -200.0
    snapshot = record(surrogate, log_probs, old, mask).snapshot()
    first = prove(snapshot, {})
    assert first is not None
    monkeypatch.setattr(Bench, "replay", None)
    again = prove(snapshot, {first.site: first.row.id})
    assert again is not None and again.row.id == first.row.id == mask_before_op.__name__
    assert all(torch.equal(again.grads[value], grad) for value, grad in first.grads.items())


def test_a_program_that_does_not_make_what_was_seen_proves_nothing() -> None:
    """Its gradient was another one: something between loss and model has changed it."""
    log_probs, old, mask = batch()
    old[1, 3] = -200.0
    recorded = record(surrogate, log_probs, old, mask)
    (value,) = (one.id for one in recorded.program.leaves if one.diff)
    assert prove(recorded.snapshot(grads={value: recorded.run.grads[value]}), {}) is not None
    assert prove(recorded.snapshot(grads={value: recorded.run.grads[value] * 2}), {}) is None
