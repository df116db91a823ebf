"""The stable form of what the code computes step by step gives its numbers, and its gradients, where these can be held."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from recorded import record
from torch import Tensor
from torch.nn import functional

from nanscope.replay.edits import stable_function
from nanscope.replay.patch import Patch
from nanscope.replay.tries import UNDERFLOWED

EPS = torch.finfo(torch.float32).eps


def wanting(*values: float) -> Tensor:
    return torch.tensor(values, requires_grad=True)


def matrices(scale: float) -> Tensor:
    torch.manual_seed(3)
    near = torch.eye(14).repeat(2, 1, 1) + 0.05 * torch.randn(2, 14, 14)
    return (near * torch.tensor([1.0, scale])[:, None, None]).requires_grad_()


def logits() -> Tensor:
    return torch.tensor([[1.0, -200.0, 3.0], [0.0, 1.0, 2.0]], requires_grad=True)


def shared_out(x: Tensor) -> Tensor:
    return x / x.sum(-1, keepdim=True)


@dataclass(frozen=True)
class Form:
    """A loss that goes wrong, and the same loss as a numerical library computes it."""

    name: str
    broken: Callable[..., Tensor]
    stable: Callable[..., Tensor]
    args: Callable[[], tuple[Tensor, ...]]


def shared(weights: Tensor) -> Tensor:
    return weights / weights.sum()


def normal_cdf(x: Tensor) -> Tensor:
    return 0.5 * (1 + torch.erf(x / math.sqrt(2)))


FORMS = [
    Form("log sigmoid", lambda x: x.sigmoid().log().sum(), lambda x: functional.logsigmoid(x).sum(), lambda: (wanting(1.0, -200.0),)),
    Form("log2 sigmoid", lambda x: x.sigmoid().log2().sum(), lambda x: (functional.logsigmoid(x) / math.log(2)).sum(), lambda: (wanting(1.0, -200.0),)),
    Form("log (1 − sigmoid)", lambda x: (1 - x.sigmoid()).log().sum(), lambda x: functional.logsigmoid(-x).sum(), lambda: (wanting(1.0, 200.0),)),
    Form("log1p (−sigmoid)", lambda x: torch.log1p(-x.sigmoid()).sum(), lambda x: functional.logsigmoid(-x).sum(), lambda: (wanting(1.0, 200.0),)),
    Form("log softmax", lambda z: z.softmax(-1).log().sum(), lambda z: z.log_softmax(-1).sum(), lambda: (logits(),)),
    Form(
        "log of what is gathered of a softmax",
        lambda z, taken: z.softmax(-1).gather(1, taken).squeeze(1).log().sum(),
        lambda z, taken: z.log_softmax(-1).gather(1, taken).sum(),
        lambda: (logits(), torch.tensor([[1], [2]])),
    ),
    Form("log Σ exp", lambda z: z.exp().sum(-1).log().sum(), lambda z: z.logsumexp(-1).sum(), lambda: (logits() * 1.0 - 250,)),
    Form("log Σ exp, all of it", lambda z: z.exp().sum().log(), lambda z: z.logsumexp((0, 1)), lambda: (logits().detach().add(150).requires_grad_(),)),
    Form(
        "log of a mean of exps", lambda z: z.exp().mean(-1, keepdim=True).log().sum(),
        lambda z: (z.logsumexp(-1) - math.log(3)).sum(), lambda: (logits().detach().add(150).requires_grad_(),),
    ),
    Form(
        "log Σ exp under a mask",
        lambda z, mask: (z.exp() * mask).sum(-1).log().sum(),
        lambda z, mask: z.masked_fill(mask == 0, -math.inf).logsumexp(-1).sum(),
        lambda: (logits().detach().add(150).requires_grad_(), torch.tensor([[1.0, 1.0, 0.0], [0.0, 1.0, 1.0]])),
    ),
    Form("log(1 + exp)", lambda x: (1 + x.exp()).log().sum(), lambda x: functional.softplus(x).sum(), lambda: (wanting(1.0, 200.0),)),
    Form("log1p(exp)", lambda x: torch.log1p(x.exp()).sum(), lambda x: functional.softplus(x).sum(), lambda: (wanting(1.0, 200.0),)),
    Form("log(1 − exp)", lambda x: (1 - x.exp()).log().sum(), lambda x: torch.log(-torch.expm1(x.clamp_max(-EPS))).sum(), lambda: (wanting(-0.5, 0.0),)),
    Form("log(exp − 1)", lambda x: (x.exp() - 1).log().sum(), lambda x: torch.expm1(x).log().sum(), lambda: (wanting(0.5, 3e-8),)),
    Form("log(exp − 1) of a large number", lambda x: torch.expm1(x).log().sum(), lambda x: x.sum() + torch.log(-torch.expm1(-x)).sum(), lambda: (wanting(0.5, 200.0),)),
    Form("log(1 − tanh²)", lambda x: torch.log(1 - x.tanh().pow(2)).sum(), lambda x: (2 * (math.log(2) - x - functional.softplus(-2 * x))).sum(), lambda: (wanting(0.5, 20.0),)),
    Form("log(1 − tanh · tanh)", lambda x: (lambda t: torch.log(1 - t * t))(x.tanh()).sum(), lambda x: (2 * (math.log(2) - x - functional.softplus(-2 * x))).sum(), lambda: (wanting(0.5, 20.0),)),
    Form("log1p(−tanh)", lambda x: torch.log1p(-x.tanh()).sum(), lambda x: (math.log(2) - functional.softplus(2 * x)).sum(), lambda: (wanting(0.5, 20.0),)),
    Form("log(1 + tanh)", lambda x: torch.log(1 + x.tanh()).sum(), lambda x: (math.log(2) - functional.softplus(-2 * x)).sum(), lambda: (wanting(0.5, -20.0),)),
    Form("atanh tanh", lambda x: x.tanh().atanh().sum(), lambda x: x.sum(), lambda: (wanting(0.5, 20.0),)),
    Form("logit sigmoid", lambda x: x.sigmoid().logit().sum(), lambda x: x.sum(), lambda: (wanting(0.5, 200.0),)),
    Form("log prod", lambda p: p.prod(-1).log().sum(), lambda p: p.log().sum(), lambda: (torch.full((2, 20), 1e-3, requires_grad=True),)),
    Form("log of a quotient of products", lambda p, q: torch.log(p.prod() / q.prod()), lambda p, q: p.log().sum() - q.log().sum(), lambda: (torch.full((20,), 1e-3, requires_grad=True), torch.full((20,), 2e-3))),
    Form("log det", lambda a: a.det().log().sum(), lambda a: torch.slogdet(a)[1].sum(), lambda: (matrices(1e-4),)),
    Form("log |det|", lambda a: a.det().abs().log().sum(), lambda a: torch.slogdet(a)[1].sum(), lambda: (matrices(1e-4),)),
    Form("a quotient of dets", lambda a, b: (a.det() / b.det()).sum(), lambda a, b: (torch.slogdet(a)[1] - torch.slogdet(b)[1]).exp().sum(), lambda: (matrices(1e-4), (1.01 * matrices(1e-4)).detach())),
    Form("log of half a det", lambda a: (0.5 * a.det()).log().sum(), lambda a: (torch.slogdet(a)[1] + math.log(0.5)).sum(), lambda: (matrices(1e-4),)),
    Form("log √det", lambda a: a.det().sqrt().log().sum(), lambda a: (0.5 * torch.slogdet(a)[1]).sum(), lambda: (matrices(1e-4),)),
    Form("log of the normal distribution", lambda x: normal_cdf(x).log().sum(), lambda x: torch.special.log_ndtr(x).sum(), lambda: (wanting(0.5, -20.0),)),
    Form("its upper tail", lambda x: (1 - normal_cdf(x)).log().sum(), lambda x: torch.special.log_ndtr(-x).sum(), lambda: (wanting(0.5, 20.0),)),
    Form("log erfc", lambda x: (0.5 * torch.erfc(x)).log().sum(), lambda x: torch.special.log_ndtr(-math.sqrt(2) * x).sum(), lambda: (wanting(0.5, 20.0),)),
    Form(
        "visits sharpened by a temperature",
        lambda n: shared_out(n**20.0).square().sum(),
        lambda n: (20.0 * n.log()).softmax(-1).square().sum(),
        lambda: (torch.tensor([[3.0, 412.0, 9.0], [92.0, 1.0, 400.0]], requires_grad=True),),
    ),
    Form(
        "weights that are shared out among all",
        lambda z: (shared(z.exp()) * z).sum(),
        lambda z: (z.softmax(0) * z).sum(),
        lambda: (wanting(-150.0, -160.0, -151.0),),
    ),
    Form("softmax by hand", lambda z: (z.exp() / z.exp().sum(-1, keepdim=True)).square().sum(), lambda z: z.softmax(-1).square().sum(), lambda: (logits().detach().add(150).requires_grad_(),)),
    Form("√Σx²", lambda x: x.pow(2).sum(-1).sqrt().sum(), lambda x: x.double().norm(dim=-1).sum().float(), lambda: (torch.tensor([[3e25, 4e25], [3.0, 4.0]], requires_grad=True),)),
]  # fmt: skip


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
def test_the_stable_form_is_what_a_library_computes(form: Form) -> None:
    """Forward and backward, at the elements that were healthy as at the one that was not."""
    recorded = record(form.broken, *form.args())
    location = recorded.location
    assert location is not None, "the loss is healthy"
    variant = stable_function(Patch(recorded.trace, location.origin))
    assert variant is not None, location.origin.op
    run = variant.program.execute(variant.tensors)
    args = [arg.detach().requires_grad_(arg.requires_grad) for arg in form.args()]
    wanted = form.stable(*args)
    assert torch.isfinite(wanted)
    torch.testing.assert_close(run.values[variant.program.output], wanted.detach(), rtol=1e-4, atol=1e-5)
    (grad,) = torch.autograd.grad(wanted, [arg for arg in args if arg.requires_grad][:1])
    (leaf,) = (leaf.id for leaf in variant.program.leaves if leaf.diff)
    torch.testing.assert_close(run.grads[leaf], grad, rtol=1e-3, atol=1e-5)


NONE = [
    ("a logarithm of data", lambda x, p: (x * p.log()).sum(), lambda: (wanting(0.5, 1.0), torch.tensor([0.5, 0.0]))),
    ("a quotient of sums", lambda x, m: (x * m).sum() / m.sum(), lambda: (wanting(0.5, 1.0), torch.zeros(2))),
    ("an exponential alone", lambda x: x.exp().mean(), lambda: (wanting(0.5, 200.0),)),
    ("1 + x", lambda x: torch.log(1 + x).sum(), lambda: (wanting(0.5, -1.0),)),
]


@pytest.mark.parametrize(("broken", "args"), [case[1:] for case in NONE], ids=[case[0] for case in NONE])
def test_what_has_no_other_form_is_left_alone(broken: Callable[..., Tensor], args: Callable[[], tuple[Tensor, ...]]) -> None:
    """Nothing is offered that would be the same."""
    recorded = record(broken, *args())
    assert recorded.location is not None
    assert stable_function(Patch(recorded.trace, recorded.location.origin)) is None


def test_a_bound_below_a_sum_that_has_underflowed_is_told_to_be_one() -> None:
    """Weights that are shared out, and come to 0 in float32: a bound makes all of them 0, and float64 says what they are."""
    weights = wanting(-200.0, -201.0, -202.0)
    replayed = record(lambda z: (shared(z.exp()).detach() * z).sum(), weights).replay()
    rows = {row.id: row for row in replayed.rows}
    assert rows["float64"].works and rows["stable_function"].works and not rows["stable_function"].cost
    assert rows["clamp_denominator"].works and rows["clamp_denominator"].cost == UNDERFLOWED
