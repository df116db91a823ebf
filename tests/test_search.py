"""`check`: which lines would kill a loss, from which number on, and which fix helps; of a loss that is guarded nothing is said."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from recorded import record
from torch import Tensor

from nanscope.capture.mode import TapeMode
from nanscope.capture.tape import Tape
from nanscope.causes import Cause
from nanscope.errors import NanscopeError
from nanscope.foresight.aims import aims
from nanscope.foresight.hazard import Check, Hazard
from nanscope.foresight.pushes import Severity, pushes
from nanscope.foresight.search import check
from nanscope.locate.trace import Trace
from nanscope.program.numbers import exponent_limit
from nanscope.roles import LOG_PROBS

LP = torch.tensor([[-1.0, -2.0, -0.5], [-0.3, -1.5, -2.5]])
OLD = LP - torch.tensor([[0.1, -0.2, 0.0], [0.3, 0.2, 0.1]])
REF = LP + 0.25
MASK = torch.tensor([[1.0, 1.0, 0.0], [1.0, 1.0, 1.0]])
ADV = torch.tensor([0.5, -1.5])


def grpo(logps, old_logps, advantages, mask):
    ratio = torch.exp(logps - old_logps)
    clipped = ratio.clamp(0.8, 1.2)
    per_token_loss = -torch.min(ratio * advantages[:, None], clipped * advantages[:, None])
    return (per_token_loss * mask).sum() / mask.sum()


def guarded(logps, old_logps, advantages, mask):
    log_ratio = ((logps - old_logps).masked_fill(mask == 0, 0.0)).clamp(-20.0, 20.0)
    ratio = torch.exp(log_ratio)
    clipped = ratio.clamp(0.8, 1.2)
    per_token_loss = -torch.min(ratio * advantages[:, None], clipped * advantages[:, None])
    return (per_token_loss * mask).sum() / mask.sum().clamp(min=1)


def checked(loss: Callable[..., Tensor], *data: Tensor) -> Check:
    return check(record(loss, LP.clone().requires_grad_(), *data).snapshot())


def of(found: Check, cause: Cause, masked: bool | None = None) -> Hazard:
    """The one hazard of a cause; masked: its trigger."""
    return next(h for h in found.hazards if h.cause is cause and masked in (None, h.trigger.masked))


@pytest.fixture(scope="module")
def of_grpo() -> Check:
    return checked(grpo, OLD, ADV, MASK)


def test_an_exponent_is_named_with_the_number_that_it_overflows_at(of_grpo: Check) -> None:
    """To a tenth of a nat, at a token that counts; the step was that far from it."""
    hazard = of(of_grpo, Cause.EXP_OVERFLOW)
    assert hazard.origin.expression == "torch.exp(logps - old_logps)" and hazard.severity is Severity.REACHABLE
    trigger = hazard.trigger
    assert trigger.distance is not None and trigger.masked is not True
    assert abs(hazard.origin.number(0) - exponent_limit(torch.float32)) < 0.1
    assert abs(trigger.value - trigger.recorded) == pytest.approx(trigger.distance, abs=1e-3)


def test_what_only_the_gradient_shows_is_called_silent(of_grpo: Check) -> None:
    """min takes the clipped branch, the loss stays finite, and backward multiplies the overflow by 0."""
    hazard = of(of_grpo, Cause.WHERE_GRAD_TRAP)
    assert hazard.spoils.silent and not hazard.spoils.loss
    assert "looks as if nothing had happened" in hazard.spoils.words


def test_a_mask_that_selects_nothing_is_tried(of_grpo: Check) -> None:
    """0 / 0 over the whole batch."""
    hazard = of(of_grpo, Cause.EMPTY_MASK_MEAN)
    assert hazard.trigger.words == "all of mask is 0" and hazard.severity is Severity.REACHABLE


def test_every_fix_was_run_on_its_trigger_and_leaves_the_healthy_step_alone(of_grpo: Check) -> None:
    """A hazard that training can reach comes with a fix that works there."""
    for hazard in of_grpo.reachable:
        assert hazard.fix is not None and hazard.fix.executed and hazard.fix.works, hazard.trigger.words
        assert hazard.change == pytest.approx(0.0, abs=1e-6), hazard.trigger.words


def test_every_hazard_was_executed(of_grpo: Check) -> None:
    """Its trigger, put into the step, spoils the loss or a gradient."""
    assert of_grpo.hazards
    for hazard in of_grpo.hazards:
        assert hazard.spoils.loss or hazard.spoils.counted or hazard.spoils.masked
        assert hazard.sentence


def test_of_a_guarded_loss_nothing_is_said_that_training_can_reach() -> None:
    """Masked before exp, clamped, and divided by at least 1."""
    found = checked(guarded, OLD, ADV, MASK)
    assert [hazard.trigger.words for hazard in found.reachable] == []
    assert "No hazard" in found.sentence or "0 of them" in found.sentence


def test_not_a_number_at_a_token_that_counts_is_broken_data(of_grpo: Check) -> None:
    """It is said, and not that training could reach it."""
    broken = [hazard for hazard in of_grpo.hazards if hazard.severity is Severity.BROKEN_DATA]
    assert broken and all(hazard.trigger.masked is not True or hazard.trigger.value != hazard.trigger.value for hazard in broken)


def groups(rewards, logps):
    grouped = rewards.view(-1, 2)
    advantages = (grouped - grouped.mean(1, keepdim=True)) / grouped.std(1, keepdim=True)
    return -(advantages.reshape(-1, 1) * logps).mean()


def test_equal_rewards_of_a_group_are_tried() -> None:
    """Their std is 0: 0 / 0, from numbers that every run meets."""
    rewards = torch.tensor([0.1, 0.9, 0.3, 0.2])
    found = check(record(groups, rewards, torch.randn(4, 3).requires_grad_()).snapshot())
    hazard = next(h for h in found.reachable if h.origin.op == "div")
    assert hazard.trigger.kind == "equal" and hazard.cause is Cause.ZERO_DIV_ZERO


def distances(states, others):
    return (states - others).square().sum(-1).sqrt().mean()


def test_two_tensors_that_become_the_same_are_tried() -> None:
    """A distance of 0 has an infinite slope, and no single number leads there."""
    found = check(record(distances, torch.randn(3, 4).requires_grad_(), torch.randn(3, 4)).snapshot())
    hazard = next(h for h in found.reachable if h.origin.op == "sqrt")
    assert hazard.trigger.kind == "like" and hazard.spoils.silent


def test_a_step_that_is_bad_is_checked_with_ordinary_numbers_in_it() -> None:
    """The line that failed is among its hazards."""
    old = OLD.clone()
    old[0, 1] = -300.0
    found = checked(grpo, old, ADV, MASK)
    assert found.healed and of(found, Cause.EXP_OVERFLOW).origin.op == "exp"


def test_a_file_without_a_program_is_refused() -> None:
    """There is nothing that could be run."""
    from nanscope.program.program import Program
    from nanscope.snapshot.step import Reached, Snapshot

    with pytest.raises(NanscopeError) as error:
        check(Snapshot(1, 0, Program((), (), -1), {}, None, {}, Reached()))
    assert error.value.slug == "nothing-to-check"


def test_half_precision_is_asked_on_request() -> None:
    """The same line, from 11 nats on; and what happens in float32 already is not told twice."""
    found = check(record(grpo, LP.clone().requires_grad_(), OLD, ADV, MASK).snapshot(), [torch.float16])
    half = [hazard for hazard in found.hazards if hazard.dtype == "float16" and hazard.origin.op == "exp"]
    assert half and all(hazard.trigger.distance is None or hazard.trigger.distance < 12 for hazard in half)
    assert sum(hazard.cause is Cause.EMPTY_MASK_MEAN for hazard in found.hazards) == 1


def large(logits):
    return (logits.square() * 1e4).mean()


def test_a_step_that_half_precision_does_not_survive_is_told_as_it_is() -> None:
    """No number has to change for that."""
    found = check(record(large, torch.tensor([3.0, 2.0]).requires_grad_()).snapshot(), [torch.float16])
    hazard = next(h for h in found.reachable if h.trigger.kind == "dtype")
    assert hazard.dtype == "float16" and hazard.cause is Cause.FP16_OVERFLOW


def test_a_search_that_is_cut_off_says_so() -> None:
    """It is not complete, whatever it has found, and says how much was left; one that is not cut off says nothing of it."""
    step = record(guarded, LP.clone().requires_grad_(), OLD, ADV, MASK).snapshot()
    cut, whole = check(step, most=20), check(step)
    assert not cut.complete and 0 < cut.left < cut.places == whole.places and whole.complete and whole.left == 0
    assert f"Not complete: {cut.left} of {cut.places} places were left" in cut.sentence and "complete" not in whole.sentence
    assert cut.to_json()["complete"] is False and cut.to_json()["left"] == cut.left and whole.to_json()["complete"] is True


def sampled(logits, old_logits, tokens):
    logps, old_logps = of_tokens(logits, tokens), of_tokens(old_logits, tokens)
    return torch.exp(logps - old_logps).mean()


def of_tokens(logits, tokens):
    return torch.log_softmax(logits, -1).gather(2, tokens.unsqueeze(2)).squeeze(2)


def test_two_tensors_that_one_function_made_have_the_names_that_they_are_read_by() -> None:
    """And the shape that they have there; one line that makes both does not make them the same."""
    tape = Tape(budget=1 << 16, wide=300)  # of what was over the vocabulary only the result is kept
    logits = torch.randn(2, 3, 50).requires_grad_()
    tokens = torch.randint(0, 50, (2, 3))
    with TapeMode(tape):
        loss = sampled(logits, torch.randn(2, 3, 50), tokens)
    program, tensors = tape.program(tape.value_of(loss))
    trace = Trace.of(program, tensors)
    assert {(aim.name, aim.shape) for aim in aims(trace)} == {("logps", (2, 3)), ("old_logps", (2, 3))}


def test_a_log_probability_above_0_is_no_number_that_training_reaches(of_grpo: Check) -> None:
    """An old one that falls is, and does the same."""
    for hazard in of_grpo.reachable:
        assert not (hazard.trigger.role in LOG_PROBS and hazard.trigger.value > 0), hazard.trigger.words
    assert of(of_grpo, Cause.EXP_OVERFLOW).trigger.words.startswith("old_logps[")


def scaled(logps, lengths):
    return (logps.mean(-1) / torch.log(lengths)).sum()


def test_what_is_never_below_0_in_a_batch_does_not_get_there() -> None:
    """The logarithm of a length that is negative is a thought; of one that is 1, or 0, it is not."""
    found = check(record(scaled, torch.randn(4, 2).requires_grad_(), torch.tensor([3.0, 5.0, 2.0, 7.0])).snapshot())
    assert any(hazard.trigger.value < 0 and hazard.severity is Severity.THEORY for hazard in found.hazards)
    assert not [hazard.trigger.words for hazard in found.reachable if hazard.trigger.tensor == "lengths" and hazard.trigger.value < 0]


def of_complex(logps, phases):
    return (logps.mean(-1) * torch.fft.fft(phases).abs().sum(-1)).sum()


def test_complex_numbers_are_left_as_they_are() -> None:
    """They have no order; what else there is, is checked."""
    found = check(record(of_complex, torch.randn(2, 3).requires_grad_(), torch.randn(2, 4)).snapshot())
    assert found.complete and found.runs and all(hazard.severity is not Severity.REACHABLE for hazard in found.hazards)


def chosen(logits, target):
    return torch.nn.functional.cross_entropy(logits, target)


def test_equal_logits_stay_within_those_that_are_not_excluded() -> None:
    """−inf is a mask there: a row that had some left keeps them."""
    logits = torch.tensor([[0.1, float("-inf"), float("-inf")], [0.3, 0.2, float("-inf")]])
    found = check(record(chosen, logits.requires_grad_(), torch.tensor([0, 1])).snapshot())
    assert not [hazard.trigger.words for hazard in found.reachable if hazard.trigger.kind == "equal"]


def gained(hidden, gain):
    return (hidden * gain).clamp(max=1e6).mean()


def test_a_number_near_the_end_of_its_range_is_not_driven_over_it() -> None:
    """Ten times 3e38 is none."""
    found = check(record(gained, torch.randn(3).requires_grad_(), torch.tensor([1.0, 3e38, 2.0])).snapshot())
    assert [hazard.trigger.words for hazard in found.reachable] == []


def test_beside_what_training_reaches_stands_nothing_that_it_does_not(of_grpo: Check) -> None:
    """NaN at a masked token dies in the same line as −inf, and is no number that a run gets to."""
    for hazard in of_grpo.reachable:
        assert not [words for words in hazard.others if "NaN" in words or "+inf" in words or ("logps" in words and "rises" in words)]


def opened(logits, mask, actions):
    mask = mask.clone()
    mask[:, 0] = True
    logits = torch.where(mask, logits, torch.tensor(float("-inf")))
    return -torch.log_softmax(logits, -1).gather(1, actions[:, None]).mean()


def test_a_number_that_stands_in_the_code_is_none_that_training_changes() -> None:
    """The first action is always allowed: that it were not is a thought."""
    logits, mask = torch.randn(3, 4).requires_grad_(), torch.tensor([[True, True, False, True]] * 3)
    found = check(record(opened, logits, mask, torch.tensor([0, 1, 3])).snapshot())
    assert not [hazard.trigger.words for hazard in found.reachable if hazard.trigger.words.endswith(("mask is 0", "tensor is 0"))]
    assert all(hazard.trigger.tensor for hazard in found.hazards)


def reset(values, rewards):
    return values.mean() + rewards[1:].mean()


def test_a_tensor_that_holds_nan_is_none_that_another_becomes_like() -> None:
    """Its first row is never read; to be like it there would be broken data."""
    rewards = torch.tensor([float("nan"), 0.5, 0.2])
    found = check(record(reset, torch.randn(3).requires_grad_(), rewards).snapshot())
    assert not [hazard.trigger.words for hazard in found.reachable]


def test_minus_infinity_is_usual_of_a_masked_log_prob_and_of_no_advantage() -> None:
    """Padding has log-probs of −inf; advantages are worked out from rewards."""

    def loss(logps, advantages, mask):
        weighted = logps * mask
        return -(weighted * advantages).sum()

    found = checked(loss, torch.randn(2, 3), MASK)
    severities = {h.trigger.tensor: h.severity for h in found.hazards if h.trigger.masked is True and h.trigger.value == -float("inf")}
    assert severities == {"logps": Severity.REACHABLE, "advantages": Severity.BROKEN_DATA}


def test_a_number_that_stands_in_the_code_is_nobodys_data() -> None:
    """No batch and no run changes `torch.tensor(0.0)`."""

    def loss(logps, mask):
        extra = torch.tensor(0.0)
        return -(logps * mask).sum() / mask.sum().clamp(min=1) + 2.0 * extra

    severities = {hazard.severity for hazard in checked(loss, MASK).hazards if hazard.trigger.tensor == "extra"}
    assert severities == {Severity.THEORY}


@pytest.mark.parametrize("ignore", ["index", "differ", "negative"])
def test_labels_that_are_all_ignored_are_tried_where_the_step_ignores_none(ignore: str) -> None:
    """What the code would leave out stands in the code: by -100 of a loss of classes, or by a comparison."""

    def loss(logits: Tensor, labels: Tensor) -> Tensor:
        shifted = labels[:, 1:].reshape(-1)
        rows = logits[:, :-1].reshape(-1, 5)
        if ignore == "index":
            return torch.nn.functional.cross_entropy(rows, shifted)
        keep = (shifted != -7 if ignore == "differ" else shifted >= 0).float()
        per_token = -rows.log_softmax(-1).gather(-1, shifted.clamp(min=0).unsqueeze(-1)).squeeze(-1)
        return (per_token * keep).sum() / keep.sum()

    torch.manual_seed(0)
    found = check(record(loss, torch.randn(2, 4, 5, requires_grad=True), torch.randint(0, 5, (2, 4))).snapshot())
    (hazard,) = [one for one in found.hazards if one.cause is Cause.EMPTY_MASK_MEAN]
    assert hazard.severity is (
        Severity.BROKEN_DATA if ignore == "index" else Severity.REACHABLE
    )  # torch's default may not be meant to come
    assert hazard.trigger.value == {"index": -100, "differ": -7, "negative": -1}[ignore] and hazard.trigger.words.startswith(
        "labels[:, 1:] is"
    )


def test_no_generator_draws_an_infinity() -> None:
    """At a masked token neither; what is drawn may stand for data, which are larger in another run."""

    def loss(log_probs: Tensor, mask: Tensor) -> Tensor:
        return (torch.exp(log_probs + torch.randn(2, 3)[:, :1]) * mask).sum() / mask.sum().clamp(min=1.0)

    trace = record(loss, torch.randn(2, 3).requires_grad_(), torch.tensor([[1.0, 1.0, 0.0], [1.0, 0.0, 0.0]])).trace
    drawn = [push for aim in aims(trace) if "randn" in aim.name for push in pushes(aim, trace)]
    assert {push.severity for push in drawn if not math.isfinite(push.strength)} == {Severity.THEORY}
    assert Severity.REACHABLE in {push.severity for push in drawn}


def test_a_mask_that_only_selects_is_called_one() -> None:
    """It has no name where it is read."""
    mask = torch.tensor([[True, True, False], [True, False, False]])
    found = check(record(lambda log_probs, mask: -log_probs[mask].mean(), torch.randn(2, 3).requires_grad_(), mask).snapshot())
    assert "all of mask is 0" in {hazard.trigger.words for hazard in found.reachable}


def test_where_nothing_could_be_tried_nothing_is_said_to_be_found() -> None:
    """Complex numbers have no larger and no smaller."""
    found = check(record(lambda z: z.real.exp().sum(), torch.randn(3, dtype=torch.complex64).requires_grad_()).snapshot())
    assert (found.runs, found.complete) == (0, False) and found.sentence.startswith("Nothing could be tried")


def test_a_step_that_no_number_heals_says_where_it_is_bad() -> None:
    """An empty batch, here."""
    step = record(lambda x: x.exp().mean(), torch.empty(0, 4).requires_grad_()).snapshot()
    with pytest.raises(NanscopeError, match=r"stays so whatever numbers are put in: x.exp\(\).mean\(\) is NaN \(.*\), of a tensor without"):
        check(step)
