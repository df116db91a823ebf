"""What a value is called and what it means: names first, then computation, then what stands around it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from recorded import Recorded, leaf, record
from torch import Tensor, nn
from torch.nn import functional

import nanscope
from nanscope.locate.names import Names
from nanscope.locate.trace import Trace
from nanscope.program.calls import Arg, Call, Leaf, Ref, Site
from nanscope.program.program import Program
from nanscope.roles import Role

SHAPE = (2, 3)


def made_by(recorded: Recorded, op: str) -> int:
    """The result of the last call of an operator."""
    return next(out for call in reversed(recorded.program.calls) if call.name == op for out in call.outs if out is not None)


def ones(*shape: int) -> Tensor:
    return torch.ones(*(shape or SHAPE))


@dataclass(frozen=True)
class Case:
    """A loss, its arguments, and the role of what one of its operators makes."""

    name: str
    loss: Callable[..., Tensor]
    args: Callable[[], tuple[Tensor, ...]]
    op: str
    role: Role | None


def bound(x: Tensor, y: Tensor) -> Tensor:
    importance_ratio = torch.exp(x - y)
    return importance_ratio.sum()


def k3(logps: Tensor, other: Tensor) -> Tensor:
    x = other - logps
    return (x.exp() - x - 1).mean()


def reused(logps: Tensor, old_logps: Tensor) -> Tensor:
    log_ratio = logps - old_logps
    log_ratio = log_ratio.exp()
    return log_ratio.mean()


def named_too_early(logps: Tensor, old_logps: Tensor) -> Tensor:
    ratio = logps - old_logps
    ratio = torch.exp(ratio)
    return ratio.mean()


def called_kl(x: Tensor, y: Tensor) -> Tensor:
    return functional.kl_div(x, y, reduction="none").sum() + 0 * x.sum()


def entropy_of(z: Tensor) -> Tensor:
    return (z * z).sum(-1).mean()


def chosen(logps: Tensor, old_logps: Tensor) -> Tensor:
    counts = torch.ones_like(logps) > 0
    delta = torch.where(counts, logps - old_logps, torch.zeros_like(logps))
    return (delta * 1.5).tanh().mean()


def divergence(student: Tensor, teacher: Tensor) -> Tensor:
    support = teacher > -1e4
    ours, theirs = student.log_softmax(-1), teacher.log_softmax(-1)
    safe_ours = torch.where(support, ours, torch.zeros_like(ours))
    safe_theirs = torch.where(support, theirs, torch.zeros_like(theirs))
    probs = torch.where(support, ours.exp(), torch.zeros_like(ours))
    loss = (probs * (safe_ours - safe_theirs)).sum(-1)
    return loss.mean()


def soft_dice(pred: Tensor, target: Tensor) -> Tensor:
    intersection = (pred * target).sum(-1)
    return 2 * intersection / (pred + target).sum(-1)


def overlap(pred: Tensor, target: Tensor) -> Tensor:
    scores = soft_dice(pred.sigmoid(), target)
    return (1.0 - scores).mean()


CASES = [
    Case("a name says it", bound, lambda: (leaf(*SHAPE), ones()), "exp", Role.RATIO),
    Case("a difference of log-probs", lambda logps, old_logps: (logps - old_logps).mean(), lambda: (leaf(*SHAPE), ones()), "sub", Role.LOG_RATIO),
    Case("e to the power of it", lambda logps, old_logps: (logps - old_logps).exp().mean(), lambda: (leaf(*SHAPE), ones()), "exp", Role.RATIO),
    Case("against a reference", lambda logps, ref_logps: (ref_logps - logps).exp().mean(), lambda: (leaf(*SHAPE), ones()), "exp", Role.KL),
    Case("exp x less x", k3, lambda: (leaf(*SHAPE), ones()), "exp", Role.KL),
    Case("a name used for one thing after another", reused, lambda: (leaf(*SHAPE), ones()), "exp", Role.RATIO),
    Case("a name given too early", named_too_early, lambda: (leaf(*SHAPE), ones()), "exp", Role.RATIO),
    Case("a copy", lambda logps, x: (logps.detach() * x).mean() + logps.mean(), lambda: (leaf(*SHAPE), ones()), "detach", Role.LOG_PROBS),
    Case("what a mask chooses of two", chosen, lambda: (leaf(*SHAPE), ones()), "where", Role.LOG_RATIO),
    Case("a probability times a log-ratio", divergence, lambda: (leaf(*SHAPE), ones()), "mul", Role.KL),
    Case("a score of how much two overlap", overlap, lambda: (leaf(*SHAPE), ones()), "div", Role.LOSS),
    Case("a sequence's sum", lambda logps, old_logps: (logps - old_logps).sum(-1).max(), lambda: (leaf(*SHAPE), ones()), "sum", Role.LOG_RATIO),
    Case("rewards less their mean", lambda rewards, x: ((rewards - rewards.mean()) * x).mean(), lambda: (ones(2), leaf(2)), "sub", Role.REWARDS),
    Case("a log-softmax", lambda z: z.log_softmax(-1)[:, 0].mean(), lambda: (leaf(*SHAPE),), "_log_softmax", Role.LOG_PROBS),
    Case("less the largest of its row", lambda z: (z - z.amax(-1, keepdim=True)).tanh().mean(), lambda: (leaf(*SHAPE),), "sub", Role.LOGITS),
    Case("over a temperature", lambda logits: (logits / 0.7).tanh().mean(), lambda: (leaf(*SHAPE),), "div", Role.LOGITS),
    Case("a scale that a policy puts out", lambda log_std, x: (log_std.exp() * x).mean(), lambda: (leaf(*SHAPE), ones()), "exp", Role.HIDDEN),
    Case("no name at all in a loss", lambda x, y: ((x - y).exp() * 2).mean(), lambda: (leaf(*SHAPE), ones()), "exp", Role.RATIO),
    Case("the function that was called", called_kl, lambda: (leaf(*SHAPE), ones()), "sub", Role.KL),
    Case("the function that it lies in", entropy_of, lambda: (leaf(*SHAPE),), "mul", Role.ENTROPY),
    Case("the end of the program", lambda x: x.tanh().mean(), lambda: (leaf(*SHAPE),), "tanh", Role.LOSS),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_a_role_is_told(case: Case) -> None:
    """By the value's name where that tells, by what made it where that does, and else by what stands around it."""
    recorded = record(case.loss, *case.args())
    assert recorded.trace.names.role(made_by(recorded, case.op)) == case.role


def test_a_value_is_called_by_what_it_is_bound_to() -> None:
    """A variable, a parameter, an argument of the reader; and nothing for a step inside an expression."""

    def loss(logps: Tensor, old_logps: Tensor, mask: Tensor) -> Tensor:
        log_ratio = logps - old_logps
        return 0.5 * (log_ratio.exp() * mask).sum()

    recorded = record(loss, leaf(*SHAPE), ones(), ones())
    names = recorded.trace.names
    first, exp = (next(call for call in recorded.program.calls if call.name == name) for name in ("sub", "exp"))
    assert [names.name(value) for value in first.inputs()] == ["logps", "old_logps"]
    assert names.name(made_by(recorded, "sub")) == "log_ratio"
    assert exp.outs[0] is not None and names.name(exp.outs[0]) is None
    assert "mask" in {names.name(found.id) for found in recorded.program.leaves}
    assert names.name(10_000) is None


MASKS: list[tuple[str, Callable[[Tensor, Tensor], Tensor], bool]] = [
    ("itself", lambda x, mask: x * mask, True),
    ("in another dtype", lambda x, mask: x * mask.double(), True),
    ("in another shape", lambda x, mask: x * mask.reshape(3, 2).t().contiguous().reshape(2, 3), True),
    ("negated", lambda x, mask: x * ~mask.bool(), True),
    ("weighed", lambda x, mask: x * (mask * 0.5), False),
    ("beside another value", lambda x, mask: x * (mask + x.detach()), False),
]


@pytest.mark.parametrize(("weigh", "says"), [row[1:] for row in MASKS], ids=[row[0] for row in MASKS])
def test_a_mask_is_one_through_copies_only(weigh: Callable[[Tensor, Tensor], Tensor], says: bool) -> None:
    """What is made of nothing but a mask, and not computed, still says which elements count."""

    def loss(x: Tensor, mask: Tensor) -> Tensor:
        return weigh(x, mask).sum()

    recorded = record(loss, leaf(*SHAPE), ones())
    product = next(call for call in reversed(recorded.program.calls) if call.name == "mul")
    assert recorded.trace.names.says_mask(list(product.inputs())[-1]) is says


@pytest.mark.parametrize("copied", [False, True])
def test_what_went_bad_is_no_mask_whatever_it_is_called(copied: bool) -> None:
    """A share of each neighbour that is divided by their number weighs what a product of matrices makes of it."""

    def loss(x: Tensor, near: Tensor) -> Tensor:
        mask = near / near.sum(-1, keepdim=True)
        mask = mask.mul(1.0).clone() if copied else mask
        return (mask @ x).square().mean()

    near = torch.ones(3, 3)
    near[1] = 0
    location = record(loss, leaf(3, 2), near).location
    assert location is not None and location.origin.op == "div" and location.origin.role is Role.HIDDEN


def test_inside_a_model_scores_are_those_of_attention() -> None:
    """A name means another thing in a module than in a loss."""

    class Attention(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            scores = x @ x.t()
            return scores.sum()

    recorded = record(lambda x: Attention()(x), leaf(2, 2))
    names = recorded.trace.names
    calls = [call for call in recorded.program.calls if call.name == "mm"]
    roles = {names.role(call.outs[0]) for call in calls if call.outs[0] is not None}
    assert roles <= {Role.ATTENTION, Role.REWARDS} and names.inside(None, "model.attn (Attention)", set()) is Role.ATTENTION
    assert (
        names.inside(None, "model.mlp (Linear)", set()) is Role.HIDDEN and names.inside(None, "moe.router (Linear)", set()) is Role.ROUTER
    )


def test_a_program_without_sources_has_no_names() -> None:
    """Values of a program whose positions are unknown are told by their computation alone."""
    recorded = record(lambda logps, old_logps: (logps - old_logps).exp().mean(), leaf(*SHAPE), ones())
    bare = Program(recorded.program.leaves, recorded.program.calls, recorded.program.output)
    names = type(recorded.trace.names)(bare)
    assert all(names.name(call.outs[0]) is None for call in bare.calls if call.outs[0] is not None)
    assert names.role(bare.output) in (Role.LOSS, Role.RATIO, None)


class Batch(NamedTuple):
    old_log_prob: Tensor
    old_values: Tensor


def filled(array: list[float]) -> Tensor:
    return torch.tensor(array).clone()


@pytest.mark.parametrize(("bad", "name"), [("old_log_prob", "old_log_prob"), ("old_values", "old_values")])
def test_what_a_buffer_hands_out_is_called_what_its_reader_calls_it(tmp_path: Path, bad: str, name: str) -> None:
    """A tensor that is made in a function of a buffer and read as an attribute of a batch: that attribute, and the line that made it."""
    model = nn.Linear(2, 1)
    numbers = {field: [0.0, 0.0, math.nan if field == bad else 0.0] for field in Batch._fields}
    with nanscope.watch(out=tmp_path) as scope:
        rollout_data = Batch(*(filled(numbers[field]) for field in Batch._fields))
        values = model(torch.ones(3, 2)).squeeze(-1)
        ratio = torch.exp(values - rollout_data.old_log_prob)
        clipped = rollout_data.old_values + torch.clamp(values - rollout_data.old_values, -0.2, 0.2)
        (ratio.mean() + clipped.square().mean()).backward()
    origin = scope.verdict.incidents[0].origin
    assert (origin.variable, origin.index) == (name, (2,)) and "torch.tensor(array)" in dict(origin.source)[origin.line or 0]


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 4), nn.Linear(4, 1)

    def forward(self, features: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(features)))  # type: ignore[no-any-return]


@pytest.mark.parametrize("put_together", [False, True])
@pytest.mark.parametrize("autocast", [False, True])
def test_what_a_model_hands_to_a_layer_has_the_name_that_it_gives_it(tmp_path: Path, autocast: bool, put_together: bool) -> None:
    """`self.first(features)`: neither `self`, nor nothing, whether it arrives beside a bias or is cast first, and also where a collator has
    put it together."""
    rows = torch.ones(2, 3)
    rows[1, 2] = math.nan
    with nanscope.watch(out=tmp_path) as scope, torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        rows = torch.stack([rows[0], rows[1]]) if put_together else rows
        Layers()(rows).float().sum().backward()
    (incident,) = scope.verdict.incidents
    assert (incident.cause, incident.origin.variable, incident.origin.index) == (
        "bad_input",
        "rows" if put_together else "features",
        (1, 2),
    ), incident.sentence


def of_itself(op: str, often: int, *more: Arg) -> Program:
    """A program in which a call reads the result of the one before it, in every tensor argument."""
    calls = [Call(f"aten.{op}", (Ref(n), *(Ref(n) if arg is None else arg for arg in more)), (), (n + 1,)) for n in range(often)]
    return Program((Leaf(0, None, "data", True),), tuple(calls), often)


@pytest.mark.parametrize(
    ("op", "often", "more"),
    [("neg.default", 3_000, ()), ("clone.default", 3_000, ()), ("add.Tensor", 3_000, (0.5,)), ("sub.Tensor", 200, (None,))],
)
def test_each_value_is_asked_once(op: str, often: int, more: tuple[Arg, ...]) -> None:
    """However long a program is, and however many ways lead back from a value: two at every call would be 2^200 in all."""
    names = Names(of_itself(op, often, *more))
    assert names.role(often) == Role.LOSS and names.name(0) is None


def origin_name(loss: Callable[..., Tensor], *args: Tensor) -> str | None:
    location = record(loss, *args).location
    assert location is not None
    return location.origin.variable


def test_what_a_list_hands_over_has_its_own_name() -> None:
    """`torch.cat([a, batch["b"]])` reads b, and not a list."""
    bad = torch.ones(SHAPE)
    bad[1, 2] = math.nan
    batch = {"scan": bad, "other": ones()}
    assert (
        origin_name(lambda x: (torch.cat([batch["other"], batch["scan"]]) * x).sum(), torch.ones(4, 3, requires_grad=True))
        == "batch['scan']"
    )


def test_each_of_several_results_has_its_own_name() -> None:
    """`values, vectors = eigh(x)` names two; what `_` stands for, and what is not unpacked, none."""

    def loss(x: Tensor) -> Tensor:
        values, vectors = torch.linalg.eigh(x)
        scale, shift = values.exp(), vectors.sin()
        return (scale + shift).sum()

    made = record(loss, torch.diag(torch.tensor([1.0, 2.0])).requires_grad_())
    names = Names(made.program)
    eigh = made.program.calls[0]
    assert [names.name(out) for out in eigh.outs if out is not None] == ["values", "vectors"]
    assert [names.name(made_by(made, op)) for op in ("exp", "sin")] == ["scale", "shift"]


def test_what_a_distribution_is_asked_names_none_of_its_tensors() -> None:
    """In `dist.log_prob(x)` no tensor is called dist, and `kl_divergence(p, q)` is of two distributions."""

    def loss(x: Tensor) -> Tensor:
        dist, other = torch.distributions.Normal(x.sin(), x.exp()), torch.distributions.Normal(0.0, 1.0)
        return (dist.log_prob(torch.ones(2)) + torch.distributions.kl_divergence(dist, other)).sum()

    made = record(loss, torch.tensor([0.5, 99.0], requires_grad=True))
    assert Names(made.program).name(made_by(made, "exp")) is None


def test_one_over_a_tensor_is_one_division() -> None:
    """`goal = 1.0 / x` is run as a reciprocal and a product, and both are the goal; `2.0 / x` is only the product."""

    def loss(x: Tensor, y: Tensor) -> Tensor:
        goal = 1.0 / x
        twice = 2.0 / y
        return (goal + twice).sum()

    made = record(loss, torch.tensor([0.0, 1.0], requires_grad=True), torch.tensor([0.5, 1.0], requires_grad=True))
    names = Names(made.program)
    assert [names.name(call.outs[0]) for call in made.program.calls if call.name == "reciprocal" and call.outs[0] is not None] == [
        "goal",
        None,
    ]


def test_what_a_number_is_divided_by_is_not_called_as_that() -> None:
    """`limit / x` arrives as the reciprocal of x, and that number."""

    def loss(x: Tensor) -> Tensor:
        adv_limit = 0.3
        return (adv_limit / x.norm(dim=-1).clamp(min=1e-6)).sum()

    recorded = record(loss, torch.ones(2, 3).requires_grad_())
    names, bounded = Names(recorded.program), next(call for call in recorded.program.calls if call.name == "clamp")
    assert bounded.outs[0] is not None and names.name(bounded.outs[0]) is None and names.role(bounded.outs[0]) is Role.LOSS


def test_a_tensor_keeps_its_name_when_an_element_is_set() -> None:
    """Setting an element gives it no other name."""

    def loss(x: Tensor) -> Tensor:
        scan = torch.linspace(0.1, 0.7, 6).reshape(SHAPE) * 2
        scan[1, 2] = math.inf
        return (x * scan).sum() * 1.0

    assert origin_name(loss, torch.zeros(SHAPE, requires_grad=True)) == "scan"


def test_what_a_constant_scales_is_called_by_its_own_name() -> None:
    """`batch["latents"] * SCALE` arrives as one tensor and a number."""
    SCALE = 0.18

    def loss(x: Tensor) -> Tensor:
        batch = {"latents": torch.linspace(0.1, 0.7, 6).reshape(SHAPE).sqrt()}
        latents = batch["latents"] * SCALE
        return (latents + x).sum()

    made = record(loss, leaf(*SHAPE))
    root = made.program.maker(made_by(made, "mul"))
    assert root is not None
    assert Names(made.program).name(next(root.inputs())) == "batch['latents']"


def test_an_infinity_that_was_put_beside_numbers_came_in() -> None:
    """Beside nothing but 0 it is a mask, and so it is among logits."""

    def loss(x: Tensor, beside: float) -> Tensor:
        scan = torch.full(SHAPE, beside)
        scan[1, 2] = -math.inf
        return (x * scan).sum()

    found = record(lambda x: loss(x, 0.3), torch.zeros(SHAPE, requires_grad=True)).location
    assert found is not None
    assert (found.phase, found.origin.index, found.origin.variable) == ("input", (1, 2), "scan")
    mask = record(lambda x: loss(x, 0.0), torch.zeros(SHAPE, requires_grad=True)).location
    assert mask is not None
    assert (mask.phase, mask.origin.op) == ("forward", "mul")


def test_a_loss_may_call_it_by_another_name_than_who_has_made_it() -> None:
    """`weights` of a buffer are the importance weights of the loss that reads them."""

    def weighed(is_weights: Tensor, td_errors: Tensor) -> Tensor:
        return (is_weights.double() * td_errors**2).mean()

    def sampled(td_errors: Tensor) -> Tensor:
        priorities = torch.linspace(0.5, 1.0, 3)
        shares = priorities ** (-0.4)
        return weighed(shares, td_errors)

    made = record(sampled, leaf(3))
    power = next(call.outs[0] for call in made.program.calls if call.name == "pow")
    assert power is not None
    assert Names(made.program).role(power) is Role.IS_WEIGHT


def test_the_logarithm_of_ratios_is_a_log_ratio() -> None:
    """Added up, too: one preferred answer against several."""

    def loss(logps: Tensor, old_logps: Tensor) -> Tensor:
        total = torch.exp(logps - old_logps).sum(-1)
        return -torch.log(total).mean()

    made = record(loss, leaf(2, 3), ones(2, 3))
    assert Names(made.program).role(made_by(made, "log")) is Role.LOG_RATIO


def test_what_a_mask_leaves_of_log_probs_is_log_probs() -> None:
    """Added up and divided by their number, too."""

    def loss(logps: Tensor, mask: Tensor) -> Tensor:
        each = (logps * mask).sum(-1) / mask.sum(-1)
        return each.exp().mean()

    made = record(loss, leaf(*SHAPE), ones(*SHAPE))
    assert Names(made.program).role(made_by(made, "div")) is Role.LOG_PROBS


def test_e_to_the_power_of_a_similarity_is_no_ratio() -> None:
    """It is a part of a softmax by hand; of a weight alone it is that of the model."""

    def loss(features: Tensor) -> Tensor:
        return torch.exp(features @ features.t() / 0.5).mean()

    made = record(loss, leaf(*SHAPE))
    assert Names(made.program).role(made_by(made, "exp")) is Role.LOGITS


def test_what_is_added_against_zero_changes_no_role() -> None:
    """The logarithm of importance weights is told as them."""

    def loss(is_weights: Tensor, x: Tensor) -> Tensor:
        return (torch.log(is_weights + 1e-10) * x).mean()

    made = record(loss, ones(*SHAPE), leaf(*SHAPE))
    assert Names(made.program).role(made_by(made, "log")) is Role.IS_WEIGHT


class RewardModel(nn.Linear):
    """Says what a completion is worth."""


@pytest.mark.parametrize(("kind", "role"), [(RewardModel, Role.REWARDS), (nn.Linear, Role.HIDDEN)], ids=["of rewards", "of anything"])
def test_labels_are_what_the_model_that_they_are_held_against_is_to_say(tmp_path: Path, kind: type[nn.Linear], role: Role) -> None:
    """A comparison that makes a mask of them says nothing of what they are."""
    torch.manual_seed(0)
    model, x, labels = kind(3, 2), torch.randn(4, 3), torch.ones(4, 2)
    labels[1, 0] = math.nan
    with nanscope.watch(out=tmp_path) as scope:
        counted = labels != -100.0
        error = (model(x) - labels) ** 2 * counted
        (error.sum() / counted.sum()).backward()
    (incident,) = scope.verdict.incidents
    assert (incident.cause, incident.origin.variable, incident.origin.role) == ("bad_input", "labels", role)


def test_a_copy_of_nothing_has_no_name() -> None:
    """A file may hold a call that copies and reads nothing; who asks for its name is answered."""
    calls = (Call("aten.clone.default", (), (), (1,), 0), Call("aten.add.Tensor", (Ref(0), Ref(1)), (), (2,), 0))
    assert Names(Program((Leaf(0, "x", "data", True),), calls, 2, (Site("a.py", 3, "f"),))).name(1) is None


def test_integers_are_no_log_probs_whatever_they_are_called() -> None:
    """A name, a reader or a row may say so; of ids, of masks and of scores integers can be."""

    def loss(x: Tensor, ids: Tensor) -> Tensor:
        return (x.gather(1, ids) * (ids > 0)).mean()

    recorded = record(loss, torch.ones(2, 3, requires_grad=True), torch.tensor([[0, 1, 2], [2, 1, 0]]))
    program, tensors = recorded.program, recorded.tensors
    for name, told in (
        ("logprobs", None),
        ("old_logps", None),
        ("logits", None),
        ("completion_ids", "response_ids"),
        ("rewards", "rewards"),
    ):
        renamed = replace(program, leaves=tuple(replace(leaf, name=name) for leaf in program.leaves))
        names = Trace.of(renamed, tensors, backward=False).names
        whole = {tensors[leaf.id].dtype: names.role(leaf.id) for leaf in renamed.leaves}
        assert whole[torch.int64] == told
        assert whole[torch.float32] == Names(renamed).role(next(leaf.id for leaf in renamed.leaves if leaf.diff))


def weighed(ratio: Tensor, advantages: Tensor) -> Tensor:
    return -(ratio * advantages).mean()


def noisy_old(log_probs: Tensor, old_log_probs: Tensor, draw: Tensor) -> Tensor:
    noise = 0.1 * draw
    noisy = old_log_probs + noise
    return weighed(torch.exp(log_probs - noisy), torch.ones(SHAPE))


def noisy_by_the_same_name(log_probs: Tensor, old_log_probs: Tensor, noise: Tensor) -> Tensor:
    old_log_probs = noise + old_log_probs
    return weighed(torch.exp(log_probs - old_log_probs), torch.ones(SHAPE))


def noisy_in_place(log_probs: Tensor, old_log_probs: Tensor, noise: Tensor) -> Tensor:
    return weighed(torch.exp(log_probs - (old_log_probs - noise.clamp(min=0))), torch.ones(SHAPE))


def shifted_ratio(log_probs: Tensor, old_log_probs: Tensor, offset: Tensor) -> Tensor:
    log_ratio = log_probs - old_log_probs - offset
    return weighed(log_ratio.exp(), torch.ones(SHAPE))


def shifted_unnamed(log_probs: Tensor, old_log_probs: Tensor, offset: Tensor) -> Tensor:
    return weighed((log_probs - old_log_probs - offset).exp(), torch.ones(SHAPE))


def with_a_bonus(log_probs: Tensor, advantages: Tensor, bonus: Tensor) -> Tensor:
    advantages = advantages + bonus
    return weighed(torch.exp(log_probs - log_probs.detach()), advantages)


def less_a_penalty(log_probs: Tensor, rewards: Tensor, penalty: Tensor) -> Tensor:
    rewards = rewards - penalty
    return weighed(torch.exp(log_probs - log_probs.detach()), rewards)


def biased(logits: Tensor, bias: Tensor, temperature: Tensor) -> Tensor:
    logits = logits + bias
    logits = logits / temperature
    return -logits.log_softmax(-1)[:, 0].mean()


def rescaled(log_probs: Tensor, advantages: Tensor, scale: Tensor) -> Tensor:
    advantages = advantages * scale
    return weighed(torch.exp(log_probs - log_probs.detach()), advantages)


def both_unnamed(log_probs: Tensor, x: Tensor, y: Tensor) -> Tensor:
    advantages = x - y
    return weighed(torch.exp(log_probs - log_probs.detach()), advantages)


def terms(first: Tensor, second: Tensor) -> Tensor:
    loss = first.sin() + second.sin()
    return loss.mean()


def activations(hidden: Tensor, y: Tensor, z: Tensor) -> Tensor:
    hidden = hidden + z
    return (hidden @ y.T).logsumexp(-1).mean()


ADDENDS: list[tuple[Callable[..., Tensor], str, dict[str, Role | None]]] = [  # a loss, which of its arguments carry a gradient, and roles
    (noisy_old, "g..", {"draw": None, "noise": None, "noisy": Role.OLD_LOG_PROBS, "old_log_probs": Role.OLD_LOG_PROBS}),
    (noisy_by_the_same_name, "g..", {"noise": None, "old_log_probs": Role.OLD_LOG_PROBS}),
    (noisy_in_place, "g..", {"noise": None, "old_log_probs": Role.OLD_LOG_PROBS, "log_probs": Role.LOG_PROBS}),
    (shifted_ratio, "g..", {"offset": None, "log_ratio": Role.LOG_RATIO, "old_log_probs": Role.OLD_LOG_PROBS}),
    (shifted_unnamed, "g..", {"offset": None, "old_log_probs": Role.OLD_LOG_PROBS}),
    (biased, "g..", {"bias": None, "temperature": None, "logits": Role.LOGITS}),
    (rescaled, "g..", {"scale": Role.ADVANTAGES, "advantages": Role.ADVANTAGES}),
    (both_unnamed, "g..", {"x": Role.ADVANTAGES, "y": Role.ADVANTAGES}),  # what nobody else tells
    (terms, "gg", {"first": Role.LOSS, "second": Role.LOSS}),  # what a loss is the sum of is one
    (activations, "g..", {"z": Role.HIDDEN}),  # and so with activations, and with rewards
    (with_a_bonus, "g..", {"bonus": Role.ADVANTAGES, "advantages": Role.ADVANTAGES}),
    (less_a_penalty, "g..", {"penalty": Role.REWARDS, "rewards": Role.REWARDS}),
]


@pytest.mark.parametrize(("loss", "carries", "roles"), ADDENDS, ids=[loss.__name__ for loss, _, _ in ADDENDS])
def test_what_is_added_to_something_is_not_that(loss: Callable[..., Tensor], carries: str, roles: dict[str, Role | None]) -> None:
    """Noise on log-probs, a bonus, a bias, a temperature: the other operand is what the result is made of, and says what that is."""
    program = record(loss, *(leaf(*SHAPE) if one == "g" else leaf(*SHAPE).detach() for one in carries)).program
    names = Names(program)
    values = [*(one.id for one in program.leaves), *(out for call in program.calls for out in call.outs if out is not None)]
    assert {name: {names.role(value) for value in values if names.name(value) == name} for name in roles} == {
        name: {role} for name, role in roles.items()
    }


@pytest.mark.parametrize("kind", ["normal", "beta"])
def test_no_fix_names_what_a_distribution_is_asked_for_what_it_calculates_with(tmp_path: Path, kind: str) -> None:
    """The 0 is a scale, or 1 less what was given, deep in torch: neither the distribution nor the action is to be bounded."""
    mean, act = torch.zeros(4, requires_grad=True), torch.tensor([0.5, 0.25, 1.0, 0.75])
    with nanscope.watch(out=tmp_path) as scope:
        if kind == "normal":
            pi = torch.distributions.Normal(mean, (act != 1.0).float(), validate_args=False)
        else:
            pi = torch.distributions.Beta(mean.exp() * 2, mean.exp() * 3, validate_args=False)
        logp = pi.log_prob(act)
        logp.mean().backward()
    (incident,) = scope.verdict.incidents
    assert incident.origin.expression == "pi.log_prob(act)", scope.verdict.sentence
    assert not [fix.label for fix in incident.fixes if " act " in fix.label or " pi " in fix.label]


def test_what_a_module_makes_inside_has_no_name_of_what_it_was_given(tmp_path: Path) -> None:
    """Of several layers in one expression only the first reads what stands there."""
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    with torch.no_grad():
        net[2].weight.fill_(3e38)
        net[0].bias.fill_(20.0)
    given = torch.ones(5, 3)
    with nanscope.watch(net, out=tmp_path) as scope:
        net(given).sum().backward()
    origin = scope.verdict.incidents[0].origin
    assert origin.op == "addmm" and not any(name == "given" for name, _ in origin.operands), origin.operands
