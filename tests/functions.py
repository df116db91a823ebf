"""Custom autograd functions as people write them, each with a fault planted, and where that is.

    case = CASES["fused cross-entropy"]
    case.train(lambda: nanscope.watch(out=folder))       one step; the function stands in the loss, or, `inside`, in a module

What goes wrong is a line in forward or backward; beside a case stands what a person would find after an afternoon: its operator, a part
of its line, the cause, and whether the loss counts the element.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

TOKENS, VOCABULARY = 6, 5
MASK = torch.tensor([1.0, 1.0, 1.0, 1.0, 1.0, 0.0])


class FusedCrossEntropy(torch.autograd.Function):
    """log p of a label, whose backward divides by the probabilities of the row instead of keeping log_softmax."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor) -> Tensor:
        probs = logits.softmax(-1)
        ctx.save_for_backward(probs, labels)
        return probs.gather(-1, labels[:, None]).squeeze(-1).clamp_min(1e-30).log()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        probs, labels = ctx.saved_tensors
        picked = probs.gather(-1, labels[:, None])
        one_hot = torch.zeros_like(probs).scatter_(-1, labels[:, None], 1.0)
        dprobs = one_hot / picked
        return grad[:, None] * probs * (dprobs - (dprobs * probs).sum(-1, keepdim=True)), None


class ChunkedEntropy(torch.autograd.Function):
    """Entropy in chunks; forward guards p · log p, backward does not."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, size: int) -> Tensor:
        ctx.save_for_backward(logits)
        ctx.size = size
        found = []
        for part in logits.split(size):
            log_probs = part.log_softmax(-1)
            found.append(-(log_probs.exp() * log_probs.clamp_min(-1e4)).sum(-1))
        return torch.cat(found)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (logits,) = ctx.saved_tensors
        out = torch.zeros_like(logits)
        for start in range(0, len(logits), ctx.size):
            rows = slice(start, start + ctx.size)
            log_probs = logits[rows].log_softmax(-1)
            plogp = log_probs.exp() * log_probs
            out[rows] = -grad[rows, None] * (plogp - log_probs.exp() * plogp.sum(-1, keepdim=True))
        return out, None


class EntropyForward(torch.autograd.Function):
    """Entropy whose forward multiplies 0 by −inf, and whose backward is fine."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor) -> Tensor:
        log_probs = logits.log_softmax(-1)
        ctx.save_for_backward(log_probs)
        plogp = log_probs.exp() * log_probs
        return -plogp.sum(-1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (log_probs,) = ctx.saved_tensors
        safe = log_probs.clamp_min(-1e4)
        probs = safe.exp()
        return -grad[:, None] * probs * (safe - (probs * safe).sum(-1, keepdim=True))


class RowNorm(torch.autograd.Function):
    """A norm of rows with an epsilon in forward, and none in the backward that somebody derived by hand."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, eps: float) -> Tensor:
        variance = x.square().mean(-1, keepdim=True)
        ctx.save_for_backward(x, variance)
        return (x * torch.rsqrt(variance + eps)).sum(-1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        x, variance = ctx.saved_tensors
        scale = torch.rsqrt(variance)
        inner = (x * scale).mean(-1, keepdim=True)
        return grad[:, None] * (scale - x * scale.square() * inner), None


class Quantised(torch.autograd.Function):
    """Rounds by a scale of the row's largest element; the backward is straight through."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        scale = x.abs().amax(-1, keepdim=True) / 127
        return (x / scale).round().mul(scale).sum(-1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad[:, None].expand(-1, VOCABULARY).clone()


class Embedded(torch.autograd.Function):
    """Adds up rows by their group; the backward means over the group, and one is empty."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, groups: Tensor) -> Tensor:
        ctx.save_for_backward(groups)
        return torch.zeros(3, VOCABULARY).index_add(0, groups, x)[groups].sum(-1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (groups,) = ctx.saved_tensors
        counts = torch.zeros(3).index_add_(0, groups, torch.ones(len(groups)))
        totals = torch.zeros(3).index_add_(0, groups, grad)
        means = totals / counts
        spread = means.sum() * 0 + means[groups]
        return spread[:, None].expand(-1, VOCABULARY).contiguous(), None


class Recomputed(torch.autograd.Function):
    """A checkpoint: backward runs forward again with gradients, and the root in there is steep at 0."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.square().sum(-1).sqrt()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        length = x.square().sum(-1, keepdim=True).sqrt()
        unit = x / length
        return grad[:, None] * unit


class Once(torch.autograd.Function):
    """`once_differentiable`, with the logarithm of what may be 0."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        probs = x.softmax(-1)
        ctx.save_for_backward(probs)
        return probs.amax(-1)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (probs,) = ctx.saved_tensors
        weights = torch.log(probs)
        return grad[:, None] * (probs * weights)


class Saved(torch.autograd.Function):
    """Keeps a ratio for backward that overflows in forward; what it returns is bounded."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ratio = torch.exp(x.sum(-1))
        ctx.save_for_backward(ratio)
        return ratio.clamp(0.8, 1.2)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (ratio,) = ctx.saved_tensors
        inside = ((ratio > 0.8) & (ratio < 1.2)).float()
        return (grad * ratio * inside)[:, None].expand(-1, VOCABULARY).contiguous()


class Several(torch.autograd.Function):
    """Several outputs, one of them without gradient; the backward divides by a count that forward has seen to be 0."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, keep: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        chosen = (x * keep).argmax(-1)
        ctx.save_for_backward(keep)
        ctx.mark_non_differentiable(chosen)
        return x.mean(-1), (x * keep).sum(-1), chosen

    @staticmethod
    def backward(ctx: Any, first: Tensor, second: Tensor, third: Tensor) -> tuple[Tensor, None]:
        (keep,) = ctx.saved_tensors
        share = keep / keep.sum(-1, keepdim=True)
        return first[:, None] / VOCABULARY + second[:, None] * share, None


class Unwritten(torch.autograd.Function):
    """Writes the rows that are in use, into memory that is not cleared."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, used: int) -> Tensor:
        ctx.used = used
        out = torch.zeros_like(x)
        out[:used] = 2 * x[:used]
        return out.sum(-1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        dx = torch.empty(len(grad), VOCABULARY)
        dx[: ctx.used] = 2 * grad[: ctx.used, None]
        return dx, None


class Kernel(Unwritten):
    """The same, by what torch does not see."""

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        dx = torch.empty(len(grad), VOCABULARY)
        dx.numpy()[: ctx.used] = 2 * grad.numpy()[: ctx.used, None]
        return dx, None


class Dirty(torch.autograd.Function):
    """Writes to what it is given, and says so."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        x.sub_(x.amax(-1, keepdim=True)).exp_()
        ctx.save_for_backward(x)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        back = grad / x
        return back * x * x


@dataclass(frozen=True, slots=True)
class Case:
    """call: what the loss does with logits. logits: what the model gives is added to. op, line, cause, masked: what is to be said."""

    call: Callable[[Tensor], Tensor]
    logits: dict[tuple[int, int], float]
    op: str
    line: str
    cause: str
    masked: bool | None = False
    phase: str = "backward"

    def train(self, watched: Callable[[], AbstractContextManager[Any]], *, inside: bool = False) -> tuple[Any, list[Tensor]]:
        """One step; what the context gave, and the gradients."""
        torch.manual_seed(3)
        model = Policy(self.call if inside else None)
        added = torch.zeros(TOKENS, VOCABULARY)
        for place, number in self.logits.items():
            added[place] = number
        with watched() as scope:
            out = model(torch.ones(TOKENS, 3), added)
            per_token = out if inside else self.call(out)
            loss = -(per_token * MASK).sum() / MASK.sum()
            torch.use_deterministic_algorithms(True)  # what nobody has written is NaN then
            try:
                loss.backward()  # type: ignore[no-untyped-call]
            finally:
                torch.use_deterministic_algorithms(False)
        return scope, [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


class Policy(nn.Module):
    """A layer, and, if the function is to be inside, what it makes of the logits."""

    def __init__(self, call: Callable[[Tensor], Tensor] | None) -> None:
        super().__init__()
        self.layer, self.call = nn.Linear(3, VOCABULARY), call

    def forward(self, x: Tensor, added: Tensor) -> Tensor:
        logits = self.layer(x) * (added > -1e6) * (added != 0.5) + added * (added != 0.5)
        return logits if self.call is None else self.call(logits)


LABELS = torch.tensor([0, 1, 2, 3, 4, 0])
KEEP = torch.ones(TOKENS, VOCABULARY)
KEEP[3] = 0.0
ZERO_ROW = {(2, column): 0.5 for column in range(VOCABULARY)}  # the model's logits are 0 there

CASES: dict[str, Case] = {
    "fused cross-entropy": Case(lambda x: FusedCrossEntropy.apply(x, LABELS), {(1, 1): -300.0}, "div", "one_hot / picked", "zero_div_zero"),
    "chunked entropy": Case(lambda x: ChunkedEntropy.apply(x, 4), {(4, 2): -math.inf}, "mul", "plogp = ", "plogp_zero"),
    "chunked entropy, masked": Case(lambda x: ChunkedEntropy.apply(x, 4), {(5, 2): -math.inf}, "mul", "plogp = ", "plogp_zero", True),
    "entropy in forward": Case(EntropyForward.apply, {(4, 2): -math.inf}, "mul", "plogp = ", "plogp_zero", phase="forward"),
    "norm": Case(lambda x: RowNorm.apply(x, 1e-6), ZERO_ROW, "rsqrt", "scale = ", "zero_denominator"),
    "quantised": Case(Quantised.apply, ZERO_ROW, "div", "x / scale", "zero_div_zero", phase="forward"),
    "index_add": Case(lambda x: Embedded.apply(x, torch.tensor([0, 0, 0, 2, 2, 2])), {}, "div", "means = ", "zero_div_zero", None),
    "recomputed": Case(Recomputed.apply, ZERO_ROW, "div", "unit = ", "zero_div_zero"),
    "once differentiable": Case(Once.apply, {(0, 3): -300.0}, "log", "weights = ", "plogp_zero"),
    "saved": Case(Saved.apply, {(1, 1): 200.0}, "exp", "ratio = torch.exp", "exp_overflow"),
    "several": Case(lambda x: sum(Several.apply(x, KEEP)[:2]), {}, "div", "share = ", "empty_mask_mean"),
    "unwritten": Case(lambda x: Unwritten.apply(x, 5), {}, "empty", "torch.empty(", "uninitialized", True),
    "unwritten by a kernel": Case(lambda x: Kernel.apply(x, 5), {}, "empty", "torch.empty(", "uninitialized", True),
    "dirty": Case(lambda x: Dirty.apply(x * 1.0).sum(-1), {(1, 1): -300.0}, "div", "back = ", "zero_denominator"),
}  # fmt: skip
