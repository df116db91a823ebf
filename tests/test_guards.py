"""What in a loss keeps its edges from harm is told, each with what would die without it; and only what does that."""

from __future__ import annotations

import torch
from recorded import record
from torch import Tensor

from nanscope.foresight.hazard import Check, Safeguard
from nanscope.foresight.pushes import Severity
from nanscope.foresight.search import check

LP = torch.tensor([[-1.0, -0.5, -2.0, -0.7], [-0.4, -1.2, -0.9, -3.0]])
OLD = torch.tensor([[-1.1, -0.4, -2.1, -0.9], [-0.5, -1.1, -1.0, -2.8]])
ADV = torch.tensor([0.7, -1.3])
MASK = torch.tensor([[1.0, 1.0, 1.0, 0.0], [1.0, 1.0, 0.0, 0.0]])


def checked(loss, *data: Tensor) -> Check:
    return check(record(loss, LP.clone().requires_grad_(), *data).snapshot())


def of(found: Check, op: str) -> Safeguard:
    """The one guard of an operator."""
    (guard,) = [guard for guard in found.guards if guard.op == op]
    return guard


def grpo(logps, old_logps, advantages, mask):
    log_ratio = (logps - old_logps).clamp(-20.0, 20.0)
    ratio = torch.exp(log_ratio)
    normed = (advantages - advantages.mean()) / (advantages.std() + 1e-4)
    clipped = ratio.clamp(0.8, 1.2)
    per_token_loss = -torch.min(ratio * normed[:, None], clipped * normed[:, None])
    return (per_token_loss * mask).sum() / mask.sum().clamp(min=1.0)


def test_a_clamp_before_exp_and_one_of_a_divisor_and_an_epsilon_are_told() -> None:
    """Each with the expression, its line, the edge that would die, and at what."""
    found = checked(grpo, OLD, ADV, MASK)
    assert not [hazard for hazard in found.reachable if hazard.origin.op in ("exp", "div")]
    before, floor = (guard for guard in found.guards if guard.op == "clamp")
    assert before.expression == "(logps - old_logps).clamp(-20.0, 20.0)" and before.stops == "exp" and before.edge == "torch.exp(log_ratio)"
    assert (
        before.edge_line == before.line + 1
        and "old_logps[0, 0] falls by 200 nats" in before.words
        and before.severity is Severity.REACHABLE
    )
    assert floor.expression == "mask.sum().clamp(min=1.0)" and (floor.stops, floor.trigger) == ("div", "all of mask is 0")
    epsilon = of(found, "add")
    assert epsilon.expression == "advantages.std() + 0.0001" and epsilon.trigger == "all of advantages is all the same"


def test_a_clip_that_keeps_nothing_from_harm_is_none() -> None:
    """The clip of the ratio, and the minimum of both sides: without them the loss is another, and as healthy."""
    found = checked(grpo, OLD, ADV, MASK)
    assert not [guard for guard in found.guards if "0.8" in guard.expression or guard.op == "minimum"]


def twice(probs):
    safe = torch.where(probs > 0, probs, torch.ones_like(probs))
    return -torch.where(probs > 0, torch.log(safe), torch.zeros_like(probs)).mean()


def test_of_two_wheres_the_one_before_the_logarithm_is_the_guard() -> None:
    """What the second one selects is finite already."""
    guard = of(check(record(twice, torch.softmax(LP, -1).requires_grad_()).snapshot()), "where")
    assert guard.expression.startswith("torch.where(probs > 0, probs, ") and guard.stops == "log" and guard.severity is Severity.REACHABLE


def filled(logps, old_logps, mask):
    log_ratio = (logps - old_logps).masked_fill(mask == 0, 0.0)
    return (torch.exp(log_ratio) * mask).sum() / 5


def test_a_mask_before_the_operator_is_told_with_a_masked_token() -> None:
    """Behind it, at the end, the other mask comes too late, and is no guard."""
    guard = of(checked(filled, OLD, MASK), "masked_fill")
    assert "at a masked token" in guard.trigger and guard.stops == "exp"
    assert not [guard for guard in checked(filled, OLD, MASK).guards if guard.op == "mul"]


def replaced(logps, rewards):
    return (torch.nan_to_num(rewards, nan=0.0) * logps.mean(-1)).sum()


def test_what_holds_back_broken_data_says_so() -> None:
    """NaN of a reward never gets into the loss; that is no operator's fault."""
    guard = of(checked(replaced, torch.tensor([0.5, 0.2])), "nan_to_num")
    assert (
        guard.severity is Severity.BROKEN_DATA and guard.stops == "" and guard.words.startswith("without it the loss takes it in: rewards[")
    )


def used(logps, rewards):
    return (torch.nan_to_num(rewards) * logps.mean(-1)).sum()


def test_a_guard_that_is_needed_already_says_that_it_is() -> None:
    """The recorded step is healthy for its sake only."""
    assert of(checked(used, torch.tensor([0.5, float("nan")])), "nan_to_num").trigger == "on the step as it is"


def naked(logps, old_logps):
    return torch.exp(logps - old_logps).mean()


def test_a_loss_without_guards_has_none() -> None:
    """Nothing is made up, and the data say what the words say."""
    assert checked(naked, OLD).guards == ()
    data = checked(grpo, OLD, ADV, MASK).to_json()["guards"]
    assert [one["stops"] for one in data] == ["exp", "div", "div"] and {one["severity"] for one in data} == {"reachable"}
