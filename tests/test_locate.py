"""The walk: from a bad loss or gradient to the element that was born bad, masked or not, in programs of every shape."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from recorded import leaf, record
from tensors import NUMBERS_ARE_FILLED_IN
from torch import Tensor, nn
from torch.distributions import Categorical, kl_divergence
from torch.nn import functional

import nanscope
from nanscope.locate import forward
from nanscope.locate.forward import Birth, walk_back
from nanscope.locate.location import locate, spotted
from nanscope.locate.observe import observe
from nanscope.locate.origin import Phase
from nanscope.locate.trace import Trace
from nanscope.roles import Role
from nanscope.verdict.sentence import what

INF, NAN = math.inf, math.nan


@dataclass(frozen=True)
class Case:
    """A loss function, its arguments, and what must be found. coefficient: a zero advantage does the harm."""

    name: str
    loss: Callable[..., Tensor]
    args: Callable[[], tuple[Tensor, ...]]
    phase: Phase
    op: str
    index: tuple[int, ...]
    masked: bool | None
    role: Role | None = None
    variable: str | None = None


def logps_with(row: int, column: int, value: float, shape: tuple[int, int] = (3, 5)) -> tuple[Tensor, Tensor]:
    logps = leaf(*shape)
    old = logps.detach() + 0.1
    old[row, column] = value
    return logps, old


def hole(row: int, column: int, shape: tuple[int, int] = (3, 5), dtype: torch.dtype = torch.float32) -> Tensor:
    mask = torch.ones(shape, dtype=dtype)
    mask[row, column] = 0
    return mask


def multiplied(logps: Tensor, old: Tensor, mask: Tensor) -> Tensor:
    ratio = torch.exp(logps - old)
    return -(ratio * mask).sum() / mask.sum()


def selected(logps: Tensor, old: Tensor, mask: Tensor) -> Tensor:
    ratio = (logps - old).exp()
    return torch.where(mask.bool(), ratio, 0.0).mean()


def indexed(logps: Tensor, old: Tensor, mask: Tensor) -> Tensor:
    importance_ratio = torch.exp(logps - old)
    return importance_ratio[mask.bool()].mean()


def filled(logps: Tensor, old: Tensor, mask: Tensor) -> Tensor:
    ratio = torch.exp(logps - old)
    return ratio.masked_fill(mask == 0, 0.0).sum()


def k3(logps: Tensor, ref_logps: Tensor, mask: Tensor) -> Tensor:
    delta = ref_logps - logps
    per_token_kl = delta.exp() - delta - 1
    return (per_token_kl * mask).sum() / mask.sum()


def clipped(logps: Tensor, old: Tensor, advantages: Tensor) -> Tensor:
    ratio = torch.exp(logps - old)
    return -torch.min(ratio * advantages, torch.clamp(ratio, 0.8, 1.2) * advantages).mean()


def chunked(logps: Tensor, old: Tensor, mask: Tensor) -> Tensor:
    losses = []
    for part, before, keep in zip(logps.split(1), old.split(1), mask.split(1), strict=True):
        ratio = torch.exp(part - before)
        losses.append((ratio * keep).sum())
    return torch.stack(losses).mean()


def sequence_level(logps: Tensor, old: Tensor) -> Tensor:
    seq_ratio = (logps - old).sum(-1).exp()
    return seq_ratio.mean()


def row_means(values: Tensor, mask: Tensor) -> Tensor:
    return ((values * mask).sum(-1) / mask.sum(-1)).mean()


def cumulative(logps: Tensor, old: Tensor) -> Tensor:
    prefix_ratio = torch.exp((logps - old).cumsum(-1))
    return prefix_ratio[:, -1].mean()


def two_steps(logps: Tensor, old: Tensor, mask: Tensor) -> Tensor:
    log_ratio = (logps - old).transpose(0, 1).contiguous().view(-1)
    ratio = torch.exp(log_ratio)
    return (ratio.view(5, 3).t() * mask).sum()


def in_place(logps: Tensor, old: Tensor, mask: Tensor) -> Tensor:
    log_ratio = logps - old
    ratio = log_ratio.exp()
    ratio = ratio * 1.0
    ratio.mul_(mask)
    return ratio.sum()


def wrote_by_slice(logps: Tensor, old: Tensor, mask: Tensor) -> Tensor:
    ratio = torch.exp(logps - old)
    total = torch.zeros_like(ratio)
    total[:, 1:] = ratio[:, 1:]
    return (total * mask).sum()


def powered(errors: Tensor, power: Tensor) -> Tensor:
    penalty = errors**power
    return penalty.mean()


def weighed(logps: Tensor, weight: Tensor) -> Tensor:
    spread = torch.where(logps > 0, torch.log(logps * weight), 0.0)
    return spread.sum()


def scored_twice(p: Tensor, q: Tensor) -> Tensor:
    old = torch.log(q * 1)
    new = torch.log(p)
    return (new - old).exp().mean()


def categorical_kl(logits: Tensor, old: Tensor) -> Tensor:
    return 0.0 * kl_divergence(Categorical(logits=old), Categorical(logits=logits)).mean()


# A number that is set where a mask is: of a mask filled with infinities it is asked where they do harm.
BY_DECISION: tuple[str, tuple[int, ...], bool | None] = ("mul", (), None) if NUMBERS_ARE_FILLED_IN else ("index_put", (0, 1), False)

CASES = [
    Case("the first of two", scored_twice, lambda: (torch.tensor([0.5, 0.0]).requires_grad_(), torch.tensor([0.5, 0.0])), Phase.FORWARD, "log", (1,), False, None, "old"),
    Case("infinite by decision", categorical_kl, lambda: (torch.tensor([[0.0, -200.0]], requires_grad=True), torch.zeros(1, 2)), Phase.FORWARD, *BY_DECISION, Role.KL),
    Case(
        "-inf of the batch, twice",
        lambda logps, ref_logps, old_logps: ((ref_logps - old_logps) * logps).sum(),
        lambda: (leaf(3), torch.tensor([0.0, -INF, 0.0]), torch.tensor([0.0, -INF, 0.0])),
        Phase.INPUT, "input", (1,), False, Role.REF_LOG_PROBS, "ref_logps",
    ),
    Case("a learned power", powered, lambda: (torch.tensor([[2.0, 0.6], [3.0, -0.5]]), torch.tensor(2.0).requires_grad_()), Phase.BACKWARD, "pow", (1, 1), False),
    Case("a learned scale", weighed, lambda: (torch.tensor([0.5, 0.0, 2.0]), torch.ones(1).requires_grad_()), Phase.BACKWARD, "log", (1,), True),
    Case("mask multiplies", multiplied, lambda: (*logps_with(1, 3, -200.0), hole(1, 3)), Phase.FORWARD, "exp", (1, 3), True, Role.RATIO, "ratio"),
    Case("integer mask", multiplied, lambda: (*logps_with(1, 3, -200.0), hole(1, 3, dtype=torch.int64)), Phase.FORWARD, "exp", (1, 3), True),
    Case("boolean mask", multiplied, lambda: (*logps_with(1, 3, -200.0), hole(1, 3, dtype=torch.bool)), Phase.FORWARD, "exp", (1, 3), True),
    Case("counted token", multiplied, lambda: (*logps_with(2, 0, -200.0), hole(1, 3)), Phase.FORWARD, "exp", (2, 0), False, Role.RATIO),
    Case("where after exp", selected, lambda: (*logps_with(0, 4, -99.0), hole(0, 4)), Phase.BACKWARD, "exp", (0, 4), True, Role.RATIO),
    Case("index after exp", indexed, lambda: (*logps_with(2, 2, -99.0), hole(2, 2)), Phase.BACKWARD, "exp", (2, 2), True, Role.RATIO),
    Case("masked_fill after exp", filled, lambda: (*logps_with(2, 2, -99.0), hole(2, 2)), Phase.BACKWARD, "exp", (2, 2), True),
    Case("k3 masked", k3, lambda: (leaf(3, 5), logps_with(0, 1, 150.0)[1], hole(0, 1)), Phase.FORWARD, "exp", (0, 1), True, Role.KL),
    Case("k3 counted", k3, lambda: (leaf(3, 5), logps_with(0, 1, 150.0)[1], hole(2, 2)), Phase.FORWARD, "exp", (0, 1), False, Role.KL),
    Case("min picks the clip", clipped, lambda: (*logps_with(0, 2, -99.0), torch.ones(3, 1)), Phase.BACKWARD, "exp", (0, 2), True, Role.RATIO),
    Case("min picks inf", clipped, lambda: (*logps_with(0, 2, -99.0), -torch.ones(3, 1)), Phase.FORWARD, "exp", (0, 2), False, Role.RATIO),
    Case("zero advantage", clipped, lambda: (*logps_with(1, 2, -99.0), torch.tensor([[1.0], [0.0], [1.0]])), Phase.FORWARD, "exp", (1, 2), False),
    Case("chunks", chunked, lambda: (*logps_with(1, 3, -200.0), hole(1, 3)), Phase.FORWARD, "exp", (0, 3), True, Role.RATIO),
    Case("sequence ratio", sequence_level, lambda: (leaf(3, 40), torch.full((3, 40), -9.0)), Phase.FORWARD, "exp", (0,), False, Role.RATIO),
    Case("prefix ratio", cumulative, lambda: (leaf(3, 40), torch.full((3, 40), -9.0)), Phase.FORWARD, "exp", (0, 39), False, Role.RATIO),
    Case("transposed and flat", two_steps, lambda: (*logps_with(1, 3, -200.0), hole(1, 3)), Phase.FORWARD, "exp", (10,), True, Role.RATIO),
    Case("in-place mask", in_place, lambda: (*logps_with(1, 3, -200.0), hole(1, 3)), Phase.FORWARD, "exp", (1, 3), True, Role.RATIO),
    Case("slice assignment", wrote_by_slice, lambda: (*logps_with(1, 3, -200.0), hole(1, 3)), Phase.FORWARD, "exp", (1, 3), True, Role.RATIO),
    Case("empty row", row_means, lambda: (leaf(3, 5), torch.tensor([[1.0] * 5, [0.0] * 5, [1.0] * 5])), Phase.FORWARD, "div", (1,), True, Role.LOSS),
    Case("empty batch", lambda v, mask: (v * mask).sum() / mask.sum(), lambda: (leaf(3, 5), torch.zeros(3, 5)), Phase.FORWARD, "div", (), None, Role.LOSS),
    Case("log of 0", lambda p: -torch.log(p).mean(), lambda: (torch.tensor([0.5, 0.0, 0.1]).requires_grad_(),), Phase.FORWARD, "log", (1,), False),
    Case("sqrt at 0", lambda x: x.sqrt().sum(), lambda: (torch.tensor([1.0, 0.0]).requires_grad_(),), Phase.BACKWARD, "sqrt", (1,), False),
    Case(
        "difference of -inf",
        lambda logps, old_logps: torch.exp(logps - old_logps).mean(),
        lambda: (torch.where(torch.tensor([True, False, True]), leaf(3), -INF), torch.tensor([-1.0, -INF, -1.0])),
        Phase.FORWARD, "sub", (1,), False, Role.LOG_RATIO,
    ),
    Case(
        "p log p",
        lambda logits, allowed: -(lambda lp: lp.exp() * lp)(logits.masked_fill(~allowed, -INF).log_softmax(-1)).sum(),
        lambda: (torch.randn(2, 4, requires_grad=True), torch.tensor([True, True, False, True])),
        Phase.FORWARD, "mul", (0, 2), False,
    ),
    Case(
        "fully masked softmax",
        lambda scores, bias: (scores + bias).softmax(-1)[:1, 0].sum(),
        lambda: (torch.randn(2, 3, requires_grad=True), torch.tensor([[0.0, 0.0, -INF], [-INF, -INF, -INF]])),
        Phase.BACKWARD, "_softmax", (1, 0), True,
    ),
    Case(
        "NaN in the batch, masked",
        lambda logps, rollout_logps, mask: (torch.exp(logps - rollout_logps) * mask).sum(),
        lambda: (*logps_with(0, 3, NAN), hole(0, 3)),
        Phase.INPUT, "input", (0, 3), True, Role.ROLLOUT_LOG_PROBS, "rollout_logps",
    ),
    Case(
        "NaN in the rewards",
        lambda logps, rewards: ((rewards - rewards.mean())[:, None] * torch.exp(logps - logps.detach())).mean(),
        lambda: (leaf(3, 5), torch.tensor([1.0, NAN, 0.0])),
        Phase.INPUT, "input", (1,), False, Role.REWARDS,
    ),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_the_origin_is_found(case: Case) -> None:
    """Phase, op, element, masked or not, and what the value means."""
    location = record(case.loss, *case.args()).location
    assert location is not None
    origin = location.origin
    assert (location.phase, origin.op, origin.index, origin.masked) == (case.phase, case.op, case.index, case.masked)
    if case.role is not None:
        assert origin.role == case.role
    if case.variable is not None:
        assert origin.variable == case.variable
    assert location.chain
    assert location.chain[0].index == origin.index


def test_operands_tell_the_numbers_of_this_step() -> None:
    """The exponent that overflowed is there, with its name."""
    location = record(multiplied, *logps_with(1, 3, -200.0), hole(1, 3)).location
    assert location is not None
    (operand,) = location.origin.operands
    assert operand.value > 190 and operand.index == (1, 3)


def test_a_zero_coefficient_is_told_from_a_mask() -> None:
    """A zero advantage is no mask, even if it is made of ones and zeros."""
    location = record(clipped, *logps_with(1, 2, -99.0), torch.tensor([[1.0], [0.0], [1.0]])).location
    assert location is not None and location.origin.coefficient == "advantages" and location.origin.masked is False


HEALTHY: list[tuple[str, Callable[..., Tensor], Callable[[], tuple[Tensor, ...]]]] = [
    ("finite", multiplied, lambda: (*logps_with(1, 3, -1.0), hole(1, 3))),
    ("masked before exp", lambda logps, old, mask: torch.exp((logps - old).masked_fill(mask == 0, -INF)).sum(), lambda: (*logps_with(1, 3, -200.0), hole(1, 3))),
    ("clamped before exp", lambda logps, old, mask: (torch.exp((logps - old).clamp(-20, 20)) * mask).sum(), lambda: (*logps_with(1, 3, -200.0), hole(1, 3))),
    ("detached and selected", lambda logps, old, mask: torch.where(mask.bool(), torch.exp((logps - old).detach()), 0.0).mean() * logps.mean(), lambda: (*logps_with(1, 3, -200.0), hole(1, 3))),
    ("-inf vocabulary", lambda z, allowed: -z.masked_fill(~allowed, -INF).log_softmax(-1)[:, 0].mean(), lambda: (torch.randn(3, 4, requires_grad=True), torch.tensor([True, True, False, True]))),
    ("cross entropy over -inf", lambda z, y: functional.cross_entropy(z.masked_fill(torch.tensor([False, False, True]), -INF), y), lambda: (torch.randn(4, 3, requires_grad=True), torch.tensor([0, 1, 1, 0]))),
    ("nan ignored", lambda logps, r: logps.mean() * torch.nanmean(r), lambda: (leaf(3), torch.tensor([1.0, NAN, 2.0]))),
    ("logsumexp over -inf", lambda z: torch.where(torch.tensor([True, False, True]), z, -INF).logsumexp(-1), lambda: (torch.randn(3, requires_grad=True),)),
]  # fmt: skip


@pytest.mark.parametrize(("loss", "args"), [case[1:] for case in HEALTHY], ids=[case[0] for case in HEALTHY])
def test_what_is_absorbed_is_no_finding(loss: Callable[..., Tensor], args: Callable[[], tuple[Tensor, ...]]) -> None:
    """Infinities that neither the loss nor a gradient ever sees lead to nothing."""
    assert record(loss, *args()).location is None


def test_an_overflow_without_harm_is_spotted() -> None:
    """What was born non-finite and absorbed can still be pointed at; what is infinite on purpose cannot."""
    recorded = record(HEALTHY[3][1], *HEALTHY[3][2]())
    found = spotted(recorded.trace)
    assert found is not None and (found.origin.op, found.origin.index) == ("exp", (1, 3))
    purpose = record(HEALTHY[4][1], *HEALTHY[4][2]())
    assert spotted(purpose.trace) is None


@given(st.integers(0, 3), st.integers(0, 5), st.booleans(), st.sampled_from(["mul", "where", "index", "fill"]), st.booleans())
def test_a_planted_overflow_is_found_wherever_it_is(row: int, column: int, masked: bool, masking: str, positive: bool) -> None:
    """Any element, masked or not, under each way of masking and either sign: the planted element comes back, and its mask."""
    logps = leaf(4, 6)
    old = logps.detach() - 0.2
    old[row, column] = -150.0
    mask = torch.ones(4, 6)
    mask[(row + 1) % 4, column] = 0
    if masked:
        mask[row, column] = 0

    def loss(logps: Tensor, old: Tensor, mask: Tensor) -> Tensor:
        ratio = torch.exp(logps - old)
        sign = 1.0 if positive else -1.0
        token_loss = ratio * sign
        if masking == "mul":
            return (token_loss * mask).mean()
        if masking == "where":
            return torch.where(mask > 0, token_loss, 0.0).mean()
        if masking == "index":
            return token_loss[mask > 0].mean()
        return token_loss.masked_fill(mask < 1, 0.0).mean()

    location = record(loss, logps, old, mask).location
    assert location is not None
    assert (location.origin.op, location.origin.index, location.origin.masked) == ("exp", (row, column), masked)
    assert location.phase == (Phase.BACKWARD if masked and masking != "mul" else Phase.FORWARD)


@pytest.mark.parametrize("write", [lambda one: one.fill_(INF), lambda one: one.copy_(torch.tensor(INF))], ids=["filled", "copied"])
def test_an_element_that_was_set_is_bad_data_of_its_tensor(write: Callable[[Tensor], Tensor]) -> None:
    """`weights[1, 4] = inf` fills or copies, as the release of torch has it; what is said of it does not depend on that."""

    def loss(logps: Tensor) -> Tensor:
        weights = torch.ones(3, 6)
        write(weights[1, 4])
        mask = torch.ones(3, 6)
        mask[1, 4:] = 0
        return (weights * logps * mask).sum()

    found = record(loss, leaf(3, 6)).location
    assert found is not None
    assert (found.phase, found.origin.index) == (Phase.INPUT, (1, 4))


@pytest.mark.parametrize(
    "hide", [lambda x: torch.nan_to_num(x), lambda x: x.clamp(-3e38, 3e38), lambda x: x.clamp_max(3e38).clamp_min(-3e38)], ids=["nan_to_num", "clamp", "clamps"]
)  # fmt: skip
@pytest.mark.parametrize("sign", [1, -1])
def test_an_infinity_that_was_made_finite_and_overflows_again_is_the_origin(hide: Callable[[Tensor], Tensor], sign: int) -> None:
    """What a sum of such numbers overflows by is the reward that came in infinite."""

    def loss(logps: Tensor, rewards: Tensor) -> Tensor:
        advantages = hide(rewards - rewards.nanmean()) if sign > 0 else -hide(rewards)
        return -(logps.exp() * advantages).sum(-1).mean()

    rewards = torch.tensor([0.5, -0.25, 1.0])
    rewards[1] = sign * INF
    found = record(loss, leaf(4, 3).detach().abs().requires_grad_(), rewards).location
    assert found is not None
    assert (found.phase, found.origin.index, found.origin.value) == (Phase.INPUT, (1,), sign * INF)


def test_what_was_written_in_two_places_came_in_with_the_tensor() -> None:
    """Its name, and the index there, of the first of the two."""

    def loss(x: Tensor) -> Tensor:
        tokens = torch.ones(3, 6, 3)
        tokens[1, 2:4] = NAN
        tokens[2, 5] = NAN
        return (x * tokens).square().mean()

    found = record(loss, leaf(3, 6, 3)).location
    assert found is not None
    assert (found.phase, found.origin.variable, found.origin.index) == (Phase.INPUT, "tokens", (1, 2, 0))


def test_a_kernel_that_reads_into_the_next_row_did_not_make_its_nan() -> None:
    """The product of a finite row and finite weights is NaN only because of the row beside it: the walk goes on there."""

    def loss(rows: Tensor, weight: Tensor) -> Tensor:
        return (rows.mm(weight) * torch.ones(4, 2)).sum()

    rows = torch.ones(4, 3)
    recorded = record(loss, rows, torch.ones(3, 2).requires_grad_())
    rows[2, 1] = NAN
    trace = Trace.of(recorded.program, recorded.tensors)
    product = next(call.outs[0] for call in trace.program.calls if call.name == "mm")
    assert product is not None
    values = {**trace.values, product: torch.full((4, 2), NAN)}  # what such a kernel gives
    root = walk_back(Trace(trace.program, replace(trace.run, values=values)), product, 2)
    assert (root.birth, root.flat) == (Birth.FED, 7)


def test_a_row_of_one_that_was_set_is_an_element() -> None:
    """Of a column of rewards, row 3 is set."""

    def loss(logps: Tensor) -> Tensor:
        rewards = torch.ones(6, 1)
        rewards[3] = INF
        return (rewards * logps.exp()).sum()

    found = record(loss, leaf(6, 1)).location
    assert found is not None
    assert (found.phase, found.origin.index, found.origin.variable) == (Phase.INPUT, (3, 0), "rewards")


def test_a_mask_that_is_filled_is_meant() -> None:
    """An infinity that is filled into more than an element is no data, whatever becomes of it."""

    def loss(logps: Tensor) -> Tensor:
        scores = logps * 2
        scores[1, 4:] = -INF
        return (scores * scores.exp()).sum()

    found = record(loss, leaf(3, 6)).location
    assert found is not None and found.phase is Phase.FORWARD and found.origin.op == "mul"


def test_no_mask_of_infinities_goes_into_a_convolution() -> None:
    """A −inf in what it reads is bad data, in the tensor that it was written into."""
    weight = torch.randn(2, 3, 3, generator=torch.Generator().manual_seed(3), requires_grad=True)

    def loss(weight: Tensor) -> Tensor:
        mels = torch.ones(1, 3, 8) * 0.3
        mels[0, :, 5:7] = -INF
        return torch.nn.functional.conv1d(mels, weight).square().mean()

    location = record(loss, weight).location
    assert location is not None
    assert (location.phase, location.origin.op) == (Phase.INPUT, "input")
    assert location.origin.index == (0, 0, 5)


def test_of_a_running_maximum_the_number_that_was_picked_goes_on() -> None:
    """It begins at −inf, which is meant, and takes on the +inf that the first tile brings."""

    def loss(x: Tensor) -> Tensor:
        tile = (x * 1e30) * 1e30
        running = torch.maximum(torch.full((2,), -INF), tile.amax(-1))
        return torch.exp(tile - running[:, None]).sum()

    location = record(loss, leaf(2, 3).detach().abs().requires_grad_()).location
    assert location is not None
    assert location.origin.op == "mul"


def test_a_loss_that_is_put_together_may_lose_the_gradient_of_what_it_reads() -> None:
    """A mean of squares is smaller than its operands: its gradient leaves half precision although the loss does not."""
    x, y = torch.ones(1, dtype=torch.float16, requires_grad=True), torch.zeros(1, dtype=torch.float16)
    recorded = record(lambda x, y: functional.mse_loss(x, y) * 50000.0, x, y)
    location = recorded.location
    assert location is not None and (location.phase, location.origin.op, location.origin.shape) == (Phase.BACKWARD, "mse_loss", ())


def by_the_same_count(values: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Two means over the tokens of a row, of which the first is computed first."""
    kept = (values.detach().abs() * mask).sum(-1) / mask.sum(-1)
    per_row = (values * mask).sum(-1) / mask.sum(-1)
    return kept, per_row


TWICE: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {  # where both of them meet; the weight is bad itself in some of the tests
    "the later one stands first": lambda kept, per_row, weight: (per_row * kept).mean(),
    "the earlier one does": lambda kept, per_row, weight: (kept * per_row).mean(),
    "further on": lambda kept, per_row, weight: (per_row.exp() - weight * kept.clamp(max=5).neg()).sum(),
    "in a list": lambda kept, per_row, weight: torch.stack([weight, per_row.mean(), kept.mean()]).sum(),
    "one behind the other": lambda kept, per_row, weight: ((per_row + kept) * per_row).sum(),
}


@pytest.mark.parametrize("name", TWICE)
@pytest.mark.parametrize("weight", [1.0, NAN])
def test_of_what_is_born_bad_twice_the_first_in_the_program_is_told(name: str, weight: float) -> None:
    """However the code goes on with both; and what was bad before it was read comes before a weight."""
    mask = torch.ones(4, 5)
    mask[2] = 0

    def loss(values: Tensor, mask: Tensor, weight: Tensor) -> Tensor:
        return TWICE[name](*by_the_same_count(values, mask), weight)

    recorded = record(loss, leaf(4, 5), mask, torch.tensor(weight, requires_grad=True))
    leaves = tuple(one if recorded.tensors[one.id].dim() else replace(one, origin="parameter") for one in recorded.program.leaves)
    location = replace(recorded, program=replace(recorded.program, leaves=leaves)).location
    assert location is not None and location.origin.born
    assert (location.origin.variable, location.origin.index) == ("kept", (2,))
    assert location.other is not None and (location.other.variable, location.other.index) == ("per_row", (2,))
    assert location.chain[location.met].op == {"further on": "sub", "in a list": "sum", "one behind the other": "add"}.get(name, "mul")


@pytest.mark.parametrize(("origin", "made_by"), [("data", ""), ("opaque", "backward")])
def test_bad_data_come_before_what_is_made_beside_them(origin: str, made_by: str) -> None:
    """A reward of NaN came with the batch, and the mean over nothing that it meets was made later; a gradient that the code takes after that
    comes later still, though nothing recorded has made it either."""

    def loss(values: Tensor, mask: Tensor, rewards: Tensor) -> Tensor:
        _, per_row = by_the_same_count(values, mask)
        return (per_row * rewards).mean()

    mask, rewards = torch.ones(4, 5), torch.ones(4)
    mask[2], rewards[2] = 0, NAN
    recorded = record(loss, leaf(4, 5), mask, rewards)
    leaves = tuple(replace(one, origin=origin, made_by=made_by) if one.name == "rewards" else one for one in recorded.program.leaves)
    location = replace(recorded, program=replace(recorded.program, leaves=leaves)).location
    assert location is not None and location.origin.variable == ("rewards" if origin == "data" else "per_row")
    assert (location.other is not None and location.other.variable == "per_row") == (origin == "data")


def test_one_birth_is_no_second_one() -> None:
    """Whatever is made of it, by however many ways it comes to the loss, and whichever other elements are bad."""

    def loss(values: Tensor, mask: Tensor) -> Tensor:
        _, per_row = by_the_same_count(values, mask)
        return (per_row * per_row.exp() + per_row.sin() * (per_row - 1)).mean()

    mask = torch.ones(4, 5)
    mask[1:3] = 0
    location = record(loss, leaf(4, 5), mask).location
    assert location is not None and (location.origin.variable, location.origin.index) == ("per_row", (1,))
    assert location.other is None


def test_a_mask_that_meets_an_overflow_is_no_second_birth() -> None:
    """It is meant."""

    def loss(values: Tensor, mask: Tensor) -> Tensor:
        scores = values.exp().neg() + mask.log()
        return scores.sum()

    location = record(loss, torch.tensor([[1.0, 200.0]], requires_grad=True), hole(0, 1, (1, 2))).location
    assert location is not None and location.origin.op == "exp" and location.other is None


@pytest.mark.parametrize(("turns", "first"), [(20, False), (20, True), (400, True)])
def test_of_the_turns_of_a_loop_the_first_is_told(turns: int, first: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each adds a mean over nothing: one fault, and no walk without end."""

    def loss(values: Tensor, mask: Tensor) -> Tensor:
        total = torch.zeros(())
        for _ in range(turns):
            turn = by_the_same_count(values, mask)[1].sum()
            total = total + turn if first else turn + total
        return total

    trace, seen = record(loss, leaf(1, 2), torch.zeros(1, 2)).trace, list[int]()
    original = forward.bad_sources
    monkeypatch.setattr(forward, "bad_sources", lambda trace, call, value, flat: seen.append(value) or original(trace, call, value, flat))
    root = walk_back(trace, trace.program.output, 0)
    assert next(call.outs[0] for call in trace.program.calls if call.name == "div") == root.value
    assert not root.other and len(set(seen)) < turns + 2 * forward.ENOUGH


def test_the_link_that_is_made_of_both_names_the_other_birth() -> None:
    """With the line where that was, and in backward, too."""

    def forward_harm(values: Tensor, mask: Tensor) -> Tensor:
        kept, per_row = by_the_same_count(values, mask)
        return (per_row * kept).mean()

    def backward_harm(values: Tensor, mask: Tensor) -> Tensor:
        kept, per_row = by_the_same_count(values, mask)
        return torch.where(mask[:, 0] > 0, per_row * kept, 0.0).mean()

    mask = torch.ones(4, 5)
    mask[2] = 0
    for loss in (forward_harm, backward_harm):
        trace = record(loss, leaf(4, 5), mask).trace
        location = locate(trace)
        assert location is not None and location.other is not None
        chain = observe(location, trace).chain
        assert [link.text for link in chain if not link.backward][:2] == [
            "kept[2]",
            f"mul[2] (also of per_row[2] = NaN, born at line {location.other.line})",
        ]


def test_what_has_come_to_the_loss_by_one_way_counts(tmp_path: Path) -> None:
    """A value of a step that the batch does not select makes the advantages of those before it, which it does."""
    torch.manual_seed(0)
    policy, rewards = nn.Linear(3, 1), torch.rand(6)
    states, chosen = torch.randn(6, 3), torch.tensor([0, 1, 2])
    states[4, 1] = torch.nan
    with nanscope.watch(policy, out=tmp_path) as scope:
        with torch.no_grad():
            values = policy(states).squeeze(-1)
        advantages, last = torch.zeros(6), torch.tensor(0.0)
        for t in reversed(range(5)):
            last = rewards[t] + 0.99 * values[t + 1] - values[t] + 0.9 * last
            advantages[t] = last
        states = states[chosen]
        (policy(states).squeeze(-1) * advantages[chosen]).mean().backward()
    origin = scope.verdict.incidents[0].origin
    assert origin.index == (4, 1) and origin.masked is not True, scope.verdict.sentence


def chained(loss: Callable[..., Tensor], *args: Tensor) -> list[tuple[str, tuple[int, ...], float]]:
    """The links from the origin to the loss, as (operator, index, number)."""
    found = record(loss, *args).location
    assert found is not None
    return [(link.op, link.index, link.value) for link in found.chain]


def test_a_chain_stays_with_its_element() -> None:
    """One token that counts and a masked one after it overflow alike: what the first becomes is told of the first."""
    logps, old, mask = leaf(3, 5), torch.zeros(3, 5), hole(1, 4)
    old[0, 2] = old[1, 4] = -200.0

    def loss(logps: Tensor, old: Tensor, mask: Tensor) -> Tensor:
        ratio = torch.exp(logps - old)
        return ((ratio * 0.5 - logps) * mask).sum() / mask.sum()

    links = chained(loss, logps, old, mask)
    assert links[:4] == [(op, (0, 2), INF) for op in ("exp", "mul", "sub", "mul")]
    assert [index for _, index, _ in links[4:]] == [(), ()] and math.isnan(links[-1][2])


@pytest.mark.parametrize("first", [(0, 1), (1, 4)])
def test_of_a_masked_and_a_counted_overflow_the_counted_one_is_told(first: tuple[int, int]) -> None:
    """Whichever stands first: no mask would have saved the loss."""
    logps, old, mask = leaf(3, 5), torch.zeros(3, 5), hole(*first)
    old[first] = old[2, 3] = -200.0
    found = record(multiplied, logps, old, mask).location
    assert found is not None and (found.origin.index, found.origin.masked) == ((2, 3), False)


def test_an_infinity_that_counts_is_followed_behind_the_product_with_the_mask() -> None:
    """Each token's KL is infinite where the code has filled in −inf; that the masked one is NaN says no more of that."""

    def loss(logps: Tensor, ref: Tensor, mask: Tensor) -> Tensor:
        ref = ref.masked_fill(ref < 0.5, -INF)
        kl = (logps.exp() * (logps - ref)).sum(-1)
        return (kl * mask).sum() / mask.sum()

    ref = torch.ones(3, 5, 4)
    ref[..., 2] = 0.0
    found = record(loss, leaf(3, 5, 4), ref, hole(0, 0)).location
    assert found is not None
    assert (found.origin.op, found.origin.index, found.origin.masked) == ("masked_fill", (0, 1, 2), False)


def test_an_infinity_that_is_set_is_the_tensors() -> None:
    """`logits[~allowed] = -inf`: the code made that, and no batch brought it."""

    def by_mask(logits: Tensor, allowed: Tensor) -> Tensor:
        logits = logits.clone()
        logits[~allowed] = -INF
        return -logits.log_softmax(-1)[:, 0].sum()

    def by_index(logits: Tensor, allowed: Tensor) -> Tensor:
        bias = torch.zeros(2, 4)
        bias[1, 0] = -INF
        return -(logits + bias).log_softmax(-1)[:, 0].sum()

    allowed = torch.ones(2, 4, dtype=torch.bool)
    allowed[1, 0] = False
    for loss in (by_mask, by_index):
        recorded = record(loss, leaf(2, 4), allowed)
        found = recorded.location
        assert found is not None and (found.phase, found.origin.index, found.origin.value) == (Phase.FORWARD, (1, 0), -INF)
        assert observe(found, recorded.trace).facts.number


def test_a_chain_through_a_row_is_of_that_row() -> None:
    """What a token's label reads of it is the next link, and not what the label of another token reads of its own."""

    def loss(logits: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
        logits = logits * 1e30 * 1e30
        return (logits.log_softmax(-1).gather(-1, labels)[..., 0] * mask).sum()

    logits = torch.zeros(2, 3, 4)
    logits[0, 2, 1] = logits[1, 0, 1] = 1.0
    mask = torch.ones(2, 3)
    mask[0, 2] = 0
    links = chained(loss, logits.requires_grad_(), torch.full((2, 3, 1), 3), mask)
    assert all(index[:2] == (1, 0) for _, index, _ in links if len(index) > 1), links


def test_a_nan_of_python_has_its_name() -> None:
    """A running mean that went bad is no bad batch."""

    def loss(logps: Tensor, rewards: Tensor) -> Tensor:
        return (logps * (rewards - NAN)).sum()

    found = record(loss, leaf(3), torch.ones(3)).location
    assert found is not None and found.origin.op == "sub" and found.origin.given is not None


def test_what_a_softmax_by_hand_hides_is_not_what_its_empty_row_makes() -> None:
    """−inf − (−inf) in a row of which nothing is left: the infinities of the other rows do no harm, though the loss counts those rows."""

    def loss(hidden: Tensor, mask: Tensor, counted: Tensor, added: bool) -> Tensor:
        scores = hidden + mask.log() if added else hidden.masked_fill(mask == 0, -INF)
        weights = torch.exp(scores - scores.max(-1, keepdim=True).values)
        pooled = (weights / weights.sum(-1, keepdim=True) * hidden).sum(-1)
        return (pooled * counted).sum() / counted.sum()

    mask = torch.ones(4, 6)
    mask[0, 3:], mask[2] = 0, 0
    for added in (False, True):
        found = record(partial(loss, added=added), leaf(4, 6), mask, (mask.sum(-1) > 0).float()).location
        assert found is not None and (found.origin.op, found.origin.index, found.origin.masked) == ("sub", (2, 0), True), found


def test_a_number_that_the_code_put_into_data_is_told_with_its_line() -> None:
    """Nothing came with the batch: a row of a buffer was never filled, or an element was overwritten."""

    def filled(logps: Tensor, advantages: Tensor, value: float) -> Tensor:
        kept = torch.full((3, 2), value)
        kept[:2] = advantages[:2]
        return (logps * kept).sum()

    def overwritten(logps: Tensor, advantages: Tensor, value: float) -> Tensor:
        kept = advantages.clone()
        kept[2, 0] = value
        return (logps * kept).sum()

    for loss in (filled, overwritten):
        recorded = record(partial(loss, value=NAN), leaf(3, 2), torch.ones(3, 2))
        found = recorded.location
        assert found is not None
        seen = observe(found, recorded.trace)
        line = loss.__code__.co_firstlineno + (1 if loss is filled else 2)
        assert seen.facts.put == f"test_locate.py:{line}" and " was set to NaN at [2, 0]" in what(seen), what(seen)
    came = record(lambda logps, advantages: (logps * advantages).sum(), leaf(3, 2), torch.full((3, 2), NAN))
    assert came.location is not None and not observe(came.location, came.trace).facts.put


def test_the_logarithm_of_a_product_with_a_mask_is_no_mask() -> None:
    """It is infinite where the code took no care of the tokens that are left out. Of masks alone, it is what is added to scores."""

    def computed(p: Tensor, mask: Tensor) -> Tensor:
        return -(torch.log(p * mask) * mask).sum() / mask.sum()

    def of_masks(scores: Tensor, mask: Tensor) -> Tensor:
        added = scores + torch.log(mask * (mask > 0).float())
        return (added * mask).sum()

    mask = torch.ones(2, 3)
    mask[1, 2] = 0
    found = record(computed, leaf(2, 3).detach().abs().requires_grad_(), mask).location
    assert found is not None and (found.origin.op, found.origin.index, found.origin.masked) == ("log", (1, 2), True), found
    found = record(of_masks, leaf(2, 3), mask).location
    assert found is not None and (found.origin.op, found.origin.index) == ("mul", (1, 2)), found


def test_an_infinity_of_the_code_that_comes_into_a_deviation_is_the_origin() -> None:
    """A deviation is taken of all that there is: what it gets is no mask, though the code wrote it."""

    def whitened(logps: Tensor, scores: Tensor, mask: Tensor) -> Tensor:
        scores = scores.masked_fill(mask == 0, -INF)
        advantages = (scores - scores.mean()) / (scores.std() + 1e-8)
        return -(logps * advantages * mask).sum()

    mask = torch.ones(2, 3)
    mask[1, 2] = 0
    found = record(whitened, leaf(2, 3), torch.arange(6.0).reshape(2, 3), mask).location
    assert found is not None and (found.origin.op, found.origin.index) == ("masked_fill", (1, 2)), found
