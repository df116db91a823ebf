"""Every edit does to a recorded program what one would write by hand, and is offered only where its mechanism is."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from recorded import leaf, record
from torch import Tensor, nn
from torch.nn import functional

import nanscope
from nanscope.errors import NanscopeError
from nanscope.locate.location import locate
from nanscope.program.calls import Call, Leaf, Ref
from nanscope.program.program import Program
from nanscope.program.run import Run
from nanscope.replay.edits import CONTROLS, EDITS
from nanscope.replay.patch import Patch, in_order
from nanscope.replay.tries import replay
from nanscope.snapshot.observation import Kind, Observation

INF, NAN = math.inf, math.nan
LOWEST = torch.finfo(torch.float32).min / 4
TINY = torch.finfo(torch.float32).eps


def allocated(x: Tensor) -> Tensor:
    """Fresh memory has a fixed content here: NaN."""
    torch.use_deterministic_algorithms(True)
    try:
        return torch.empty(x.shape)
    finally:
        torch.use_deterministic_algorithms(False)


@dataclass(frozen=True)
class Case:
    """A loss that goes wrong, the same loss mended by hand, and the edit that makes the one of the other."""

    edit: str
    name: str
    broken: Callable[..., Tensor]
    mended: Callable[..., Tensor]
    args: Callable[[], tuple[Tensor, ...]]


def logps_with(value: float) -> tuple[Tensor, Tensor]:
    """Log-probs of [2, 3] that want a gradient, and old ones with one number far off."""
    torch.manual_seed(0)
    logps = leaf(2, 3)
    old_logps = logps.detach() + 0.1
    old_logps[1, 2] = value
    return logps, old_logps


def hole() -> Tensor:
    return torch.tensor([[1.0, 1.0, 1.0], [1.0, 1.0, 0.0]])


def wanting(*values: float, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.tensor(values, dtype=dtype, requires_grad=True)


def ratio_of(logps: Tensor, old_logps: Tensor, mask: Tensor) -> Tensor:
    ratio = torch.exp(logps - old_logps)
    return (ratio * mask).sum()


def ratio_selected(logps: Tensor, old_logps: Tensor, mask: Tensor) -> Tensor:
    ratio = torch.exp(logps - old_logps)
    return torch.where(mask.bool(), ratio, 0.0).sum()


def ratio_masked_first(logps: Tensor, old_logps: Tensor, mask: Tensor) -> Tensor:
    return (torch.exp(torch.where(mask != 0, logps - old_logps, 0.0)) * mask).sum()


def chunks(logps: Tensor, old_logps: Tensor, mask: Tensor) -> Tensor:
    losses = []
    for part, before, keep in zip(logps.split(1), old_logps.split(1), mask.split(1), strict=True):
        ratio = torch.exp(part - before)
        losses.append((ratio * keep).sum())
    return torch.stack(losses).sum()


def fed(logps: Tensor, rollout_logps: Tensor) -> Tensor:
    return (logps - rollout_logps).square().mean()


CASES = [
    Case("initialise_memory", "never written", lambda x: (x + allocated(x)).sum(), lambda x: x.sum(), lambda: (torch.ones(3, requires_grad=True),)),
    Case("mask_before_op", "multiplied", ratio_of, ratio_masked_first, lambda: (*logps_with(-200.0), hole())),
    Case("mask_before_op", "selected", ratio_selected, ratio_masked_first, lambda: (*logps_with(-200.0), hole())),
    Case(
        "mask_before_op", "the mask stands first",
        lambda x, old, mask: (x * (mask * old.abs())).sum(),
        lambda x, old, mask: (x * (mask * torch.where(mask != 0, old.abs(), 0.0))).sum(),
        lambda: (*logps_with(-INF), hole()),
    ),
    Case("mask_before_op", "chunks, each with its own mask", chunks, ratio_masked_first, lambda: (*logps_with(-200.0), hole())),
    Case(
        "clamp_exponent", "a ratio",
        lambda logps, old_logps: torch.exp(logps - old_logps).mean(),
        lambda logps, old_logps: torch.exp((logps - old_logps).clamp(-20, 20)).mean(),
        lambda: logps_with(-200.0),
    ),
    Case(
        "clamp_denominator", "a count",
        lambda x, mask: (x * mask).sum() / mask.sum(),
        lambda x, mask: (x * mask).sum() / mask.sum().clamp_min(1),
        lambda: (leaf(2, 3), torch.zeros(2, 3)),
    ),
    Case(
        "clamp_denominator", "a scale",
        lambda x, scale: (x / scale).sum(),
        lambda x, scale: (x / scale.clamp_min(1e-8)).sum(),
        lambda: (wanting(1.0, 2.0), torch.tensor([0.5, 0.0])),
    ),
    Case("skip_disabled_term", "a coefficient that is 0", lambda p: p.sum() + 0.0 * p.exp().sum(), lambda p: p.sum() + 0.0, lambda: (wanting(0.5, 99.0),)),
    Case("clamp_input", "the argument of xlogy", lambda p: torch.xlogy(p.detach() + 1, p).sum(), lambda p: torch.xlogy(p.detach() + 1, p.clamp_min(1e-8)).sum(), lambda: (wanting(0.5, 0.0),)),
    Case("clamp_input", "log of 0", lambda p: p.log().sum(), lambda p: p.clamp_min(1e-8).log().sum(), lambda: (wanting(0.5, 0.0),)),
    Case("clamp_input", "log1p of −1", lambda p: p.log1p().sum(), lambda p: p.clamp_min(TINY - 1).log1p().sum(), lambda: (wanting(0.5, -1.0),)),
    Case("clamp_input", "acos beyond 1", lambda c: c.acos().sum(), lambda c: c.clamp(TINY - 1, 1 - TINY).acos().sum(), lambda: (wanting(0.5, 1.0000005, -1.0000005),)),
    Case("clamp_input", "acosh below 1", lambda c: c.acosh().sum(), lambda c: c.clamp_min(1 + TINY).acosh().sum(), lambda: (wanting(1.5, 0.9999995),)),
    Case("clamp_input", "atanh of 1", lambda c: c.atanh().sum(), lambda c: c.clamp(TINY - 1, 1 - TINY).atanh().sum(), lambda: (wanting(0.5, 1.0),)),
    Case("clamp_input", "logit of 0", lambda c: c.logit().sum(), lambda c: c.clamp(TINY, 1 - TINY).logit().sum(), lambda: (wanting(0.5, 0.0),)),
    Case("stable_function", "log of a sigmoid", lambda x: x.sigmoid().log().sum(), lambda x: functional.logsigmoid(x).sum(), lambda: (wanting(1.0, -200.0),)),
    Case("stable_function", "log of a softmax", lambda z: z.softmax(-1).log().sum(), lambda z: z.log_softmax(-1).sum(), lambda: (wanting(1.0, -200.0, 3.0),)),
    Case(
        "stable_function", "log1p(−exp(x))",
        lambda x: torch.log1p(-torch.exp(x)).sum(),
        lambda x: torch.log(-torch.expm1(x.clamp_max(-TINY))).sum(),
        lambda: (wanting(-0.5, 0.0),),
    ),
    Case(
        "stable_function", "p log p",
        lambda z, allowed: (lambda lp: (lp.exp() * lp).sum())(z.masked_fill(~allowed, -INF).log_softmax(-1)),
        lambda z, allowed: (lambda lp: (lp.exp() * lp.masked_fill(lp.isinf(), 0.0)).sum())(z.masked_fill(~allowed, -INF).log_softmax(-1)),
        lambda: (wanting(0.5, 0.0, 1.0), torch.tensor([True, False, True])),
    ),
    Case(
        "finite_mask_fill", "a row without a finite score",
        lambda scores, bias: (scores + bias).softmax(-1).square().sum(),
        lambda scores, bias: (scores + bias).clamp_min(LOWEST).softmax(-1).square().sum(),
        lambda: (torch.ones(2, 2, requires_grad=True), torch.tensor([[0.0, -INF], [-INF, -INF]])),
    ),
    Case(
        "safe_softmax", "a row without a finite score",
        lambda scores, bias: (scores + bias).softmax(-1).square().sum(),
        lambda scores, bias: torch.ops.aten._safe_softmax(scores + bias, -1).square().sum(),
        lambda: (torch.ones(2, 2, requires_grad=True), torch.tensor([[0.0, -INF], [-INF, -INF]])),
    ),
    Case(
        "upcast_fp32", "half precision",
        lambda x: (torch.exp(x * 4) / 1e4).sum(),
        lambda x: (torch.exp((x * 4).float()) / 1e4).sum(),
        lambda: (wanting(1.0, 3.0, dtype=torch.float16),),
    ),
    Case(
        "representable_eps", "half precision",
        lambda x, std: (x / (std + 1e-8)).sum(),
        lambda x, std: (x / (std + 1e-4)).sum(),
        lambda: (wanting(1.0, 3.0, dtype=torch.float16), torch.tensor([1.0, 0.0], dtype=torch.float16)),
    ),
    Case("guard_small_group", "one sample", lambda x: x.std(-1).sum(), lambda x: x.std(-1, correction=0).sum(), lambda: (torch.ones(2, 1, requires_grad=True),)),
    Case(
        "guard_empty", "nothing is selected",
        lambda x, mask: x[mask].mean() + x.sum(),
        lambda x, mask: x[mask].mean().nan_to_num(0.0) + x.sum() if mask.any() else x.sum(),
        lambda: (wanting(1.0, 2.0), torch.tensor([False, False])),
    ),
    Case(
        "drop_invalid_sample", "−inf on both sides",
        lambda logps, old_logps: (logps.masked_fill(old_logps == -INF, -INF) - old_logps).mean(),
        lambda logps, old_logps: torch.where(old_logps == -INF, 0.0, logps - old_logps).mean(),
        lambda: logps_with(-INF),
    ),
    Case("reject_input", "NaN in the batch", fed, lambda x, y: (x - y.nan_to_num(0.0)).square().mean(), lambda: logps_with(NAN)),
    Case("avoid_singular_op", "the root of 0", lambda x: x.sqrt().sum(), lambda x: (x + 1e-8).sqrt().sum(), lambda: (wanting(4.0, 0.0),)),
]  # fmt: skip


def patched(loss: Callable[..., Tensor], args: tuple[Tensor, ...]) -> Patch:
    trace = record(loss, *args).trace
    location = locate(trace)
    assert location is not None
    return Patch(trace, location.origin)


def edited(patch: Patch, name: str) -> Run:
    variant = {**EDITS, **CONTROLS}[name](patch)
    assert variant is not None and variant.id == name
    return variant.program.execute(variant.tensors)


@pytest.mark.parametrize("case", CASES, ids=[f"{case.edit}: {case.name}" for case in CASES])
def test_an_edit_is_what_one_would_write(case: Case) -> None:
    """Loss and gradient of the edited program are finite, and those of the loss mended by hand."""
    args = case.args()
    patch = patched(case.broken, args)
    run = edited(patch, case.edit)
    loss = run.values[EDITS[case.edit](patch).program.output]  # type: ignore[union-attr]
    mended = case.mended(*args)
    (wanted,) = torch.autograd.grad(mended, args[0])
    assert torch.isfinite(loss)
    assert loss.item() == pytest.approx(mended.item(), rel=1e-3 if args[0].dtype is torch.float16 else 1e-6)
    (got,) = (run.grads[found.id] for found in patch.program.leaves if found.diff)
    assert torch.isfinite(got).all()
    assert torch.allclose(got.float(), wanted.float(), rtol=1e-3 if args[0].dtype is torch.float16 else 1e-5)


def test_every_edit_has_a_case() -> None:
    """What nobody compares with a loss mended by hand may do anything."""
    assert {case.edit for case in CASES} == set(EDITS)


@pytest.mark.parametrize("case", CASES, ids=[f"{case.edit}: {case.name}" for case in CASES])
def test_an_edit_leaves_the_recording_alone(case: Case) -> None:
    """Program and tensors of the step are what they were, whatever was tried."""
    patch = patched(case.broken, case.args())
    program, before = patch.program, {value: tensor.clone() for value, tensor in patch.tensors.items()}
    for edit in (*EDITS.values(), *CONTROLS.values()):
        edit(patch)
    assert patch.program is program and patch.tensors.keys() == before.keys()
    assert all(torch.equal(patch.tensors[value].nan_to_num(), tensor.nan_to_num()) for value, tensor in before.items())


@pytest.mark.parametrize("name", sorted(CONTROLS))
def test_a_control_mends_the_value_and_not_the_gradient(name: str) -> None:
    """What people try first, after the op: forward looks repaired, backward computes 0 · inf as before."""
    patch = patched(ratio_of, (*logps_with(-200.0), hole()))
    run = edited(patch, name)
    variant = CONTROLS[name](patch)
    assert variant is not None and variant.control
    assert torch.isfinite(run.values[variant.program.output])
    (grad,) = (run.grads[found.id] for found in patch.program.leaves if found.diff)
    assert not torch.isfinite(grad).all()


OFFERED: list[tuple[str, Callable[..., Tensor], Callable[[], tuple[Tensor, ...]], set[str]]] = [
    ("exp, masked", ratio_of, lambda: (*logps_with(-200.0), hole()), {"mask_before_op", "clamp_exponent"}),
    ("exp, counted", ratio_of, lambda: (*logps_with(-200.0), torch.ones(2, 3)), {"clamp_exponent"}),
    ("log", lambda p: p.log().sum(), lambda: (wanting(0.5, 0.0),), {"clamp_input"}),
    ("sqrt", lambda x: x.sqrt().sum(), lambda: (wanting(4.0, 0.0),), {"clamp_input", "avoid_singular_op"}),
    ("division", lambda x, s: (x / s).sum(), lambda: (wanting(1.0, 2.0), torch.tensor([0.5, 0.0])), {"clamp_denominator"}),
    ("std", lambda x: x.std(-1).sum(), lambda: (torch.ones(2, 1, requires_grad=True),), {"guard_small_group", "avoid_singular_op"}),
    ("input", fed, lambda: logps_with(NAN), {"drop_invalid_sample", "reject_input"}),
]


@pytest.mark.parametrize(("loss", "args", "names"), [row[1:] for row in OFFERED], ids=[row[0] for row in OFFERED])
def test_an_edit_is_offered_where_its_mechanism_is(
    loss: Callable[..., Tensor], args: Callable[[], tuple[Tensor, ...]], names: set[str]
) -> None:
    """And nowhere else: a row of a replay that changes nothing is noise."""
    patch = patched(loss, args())
    assert {name for name, edit in EDITS.items() if edit(patch) is not None} == names


def test_a_weight_is_not_mended_by_looking_away() -> None:
    """A parameter that is NaN has to be restored; no edit of the loss pretends otherwise."""

    patch = patched(fed, logps_with(NAN))
    assert patch.origin.leaf is not None
    patch = replace(patch, origin=replace(patch.origin, leaf=replace(patch.origin.leaf, origin="parameter")))
    assert [name for name, edit in EDITS.items() if edit(patch) is not None] == []


def test_calls_are_put_behind_what_they_read() -> None:
    """Each as early as it stood, where it can; tens of thousands of them, too, in no more time than it takes to look at each."""
    many = 20_000
    calls = [Call("aten.neg.default", (Ref(0),), (), (value,)) for value in range(1, many)]
    late = Call("aten.mul.Tensor", (Ref(1), Ref(many - 1)), (), (many,))
    read = Call("aten.add.Tensor", (Ref(many), Ref(many)), (), (many + 1,))
    program = Program((Leaf(0, "x", "data", True),), (read, late, *calls), many + 1)
    assert in_order(program).calls == (*calls, late, read)
    with pytest.raises(NanscopeError, match="depends on the value"):
        in_order(replace(program, calls=(read, replace(late, args=(Ref(many + 1), Ref(1))), *calls)))


def test_a_mask_that_asks_what_is_finite_masks_what_it_was_asked_of() -> None:
    """`tokens.isnan()` still reads the tokens as they came, everything else reads them filled."""

    def loss(x: Tensor, tokens: Tensor, hidden: Tensor) -> Tensor:
        counts = hidden & ~tokens.isnan().any(-1)
        return ((x * tokens - tokens).abs().mean(-1) * counts.float()).sum() / counts.sum()

    tokens, hidden = torch.ones(2, 3, 2), torch.tensor([[True, True, False], [True, True, True]])
    tokens[1, 2] = NAN
    x = leaf(2, 3, 2)
    row = {row.id: row for row in record(loss, x, tokens, hidden).replay().rows}["mask_before_op"]
    assert row.works and row.loss == pytest.approx(float(loss(x.detach(), tokens.nan_to_num(0.0), hidden & hole().bool())))


def test_a_mask_of_tokens_masks_all_numbers_of_a_token() -> None:
    """What has one more dimension than the mask is masked token by token."""
    teacher = torch.full((2, 3, 2), -1.0)
    teacher[1, 2, 0] = -INF
    mask = torch.tensor([[True, True, True], [True, True, False]])

    def loss(student: Tensor) -> Tensor:
        return torch.nan_to_num(student.exp() * (student - teacher), posinf=0.0).sum(-1)[mask].sum()

    row = {row.id: row for row in record(loss, leaf(2, 3, 2)).replay().rows}["mask_before_op"]
    assert row.works, row
    assert row.distortion == 0


def test_a_square_that_is_too_large_is_bounded_on_both_sides() -> None:
    """A negative number has one as well, and of a spike the others tell how large it may be."""
    x = torch.tensor([0.5, -0.7, -1e19, 0.3], requires_grad=True)
    recorded = record(lambda x: (x**2).mean(), x)
    row = next(row for row in replay(recorded.snapshot(observation=Observation(Kind.SPIKE))).rows if row.id == "clamp_input")
    assert row.works and "to ±6" in row.label


def test_a_square_that_overflows_is_bounded_by_what_is_squared_beside_it() -> None:
    """The fourth root of the largest number is none: its square would be all of the loss."""
    x = torch.tensor([0.5, -0.7, -3e19, 0.3], requires_grad=True)
    row = {row.id: row for row in record(lambda x: (x**2).mean(), x).replay().rows}["clamp_input"]
    assert row.works and row.proven and "to ±6" in row.label


def test_a_number_that_is_most_of_the_loss_is_no_proven_fix() -> None:
    """−inf in the place of an entry whose logarithm the loss reads: the largest number instead is read as well."""
    hidden = torch.tensor([[False, False, True], [False, False, False]])

    def loss(x: torch.Tensor) -> torch.Tensor:
        return -x.masked_fill(hidden, -torch.inf).log_softmax(-1).mean()

    row = {row.id: row for row in record(loss, leaf(2, 3)).replay().rows}["finite_mask_fill"]
    assert row.works and not row.proven and row.cost.startswith("leaves a loss"), row


@pytest.mark.parametrize("numbers", [False, True])
def test_what_is_put_into_masked_elements_is_masked_behind_that(tmp_path: Path, numbers: bool) -> None:
    """Not the tensor that it is put into, of which these elements are overwritten."""
    torch.manual_seed(0)
    net, mask = nn.Linear(4, 3), torch.tensor([[True, True, False], [True, False, False]])
    mask = mask.float() if numbers else mask
    with nanscope.watch(net, out=tmp_path) as scope:
        log_probs = net(torch.randn(2, 4)).log_softmax(-1)
        old = log_probs.detach().clone()
        old[mask == 0] = -math.inf
        ((torch.exp(log_probs - old) * mask).sum() / mask.sum()).backward()
    (incident,) = scope.verdict.incidents
    assert (incident.cause, incident.fixes[0].id, incident.fixes[0].works) == ("inf_times_zero_mask", "mask_before_op", True)
    assert "old = old[" not in incident.sentence
