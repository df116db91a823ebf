"""In deep steps: is the update of a few weights what float64 makes of the optimizer's own state?

Adam divides a mean of gradients by the root of a mean of their squares, and these two belong together: by Cauchy and Schwarz the first is
never more than `_reach` times that root, whatever the gradients were. Where it is, the state is not one that gradients have made. A second
moment that rounded to 0 in half precision, on its way through a checkpoint for instance, leaves nothing to divide by but epsilon: the
update is thousands of times too large, and finite. Elements from all over each weight are looked at, and they stay on the device.

What a second moment has overflowed to, for instance of gradients beyond 256 in half precision, is infinite for good: whatever is divided by
its root is 0, and these elements train no more, while every loss, gradient and weight is finite. All states are asked for that.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

from nanscope.locate.observe import observe_update
from nanscope.program.local import local
from nanscope.program.numbers import at, first_nonfinite, is_finite, largest_in
from nanscope.snapshot.observation import Observation
from nanscope.text import number, unravel
from nanscope.watching.left import spread

FEW = 32  # weights of an optimizer that are looked at
SAMPLE = 1 << 14  # elements of one
TOO_LARGE = 10.0  # times what float64 makes of the state, and times the learning rate
MEAN, SQUARES = "exp_avg", "exp_avg_sq"  # of the gradients
HUGE = 1e4  # an element of a weight; those of language models are below 100
KINDS = frozenset({"Adam", "AdamW", "CPUAdam", "DeepSpeedCPUAdam", "FusedAdam"})  # classes of optimizers that update like Adam


@dataclass(frozen=True, slots=True)
class Sample:
    """Elements of a weight before its update, one of so many (stride). group: of its optimizer."""

    weight: nn.Parameter
    content: Tensor
    stride: int
    group: dict[str, Any]

    def of(self, tensor: object) -> Tensor | None:
        """Return the same elements of what has the weight's shape, None where it has not."""
        part = local(tensor) if isinstance(tensor, Tensor) else None
        if part is None or not part.is_floating_point() or part.dtype.itemsize < 2:
            return None
        own = part.flatten()[:: self.stride]
        return own.double() if own.shape == self.content.shape and own.device == self.content.device else None


@dataclass(frozen=True, slots=True)
class Moved:
    """How far elements went, and how far float64 would have gone. times: too far, 0 where it is not too far."""

    sample: Sample
    moved: Tensor
    mean: Tensor
    squares: Tensor
    times: Tensor


class Updates:
    """Asked around the step of an optimizer."""

    def __init__(self) -> None:
        self._samples: list[Sample] = []

    def begin(self, optimizer: torch.optim.Optimizer) -> None:
        """It is about to step."""
        self._samples = []
        if type(optimizer).__name__ not in KINDS:  # one that is derived from these may update otherwise
            return
        groups = {id(weight): group for group in optimizer.param_groups for weight in group["params"] if weight.grad is not None}
        weights = [weight for group in optimizer.param_groups for weight in group["params"] if id(weight) in groups]
        for weight in spread(weights, FEW):
            part = local(weight)
            if part is not None and part.numel():
                stride = max(1, part.numel() // SAMPLE)
                self._samples.append(Sample(weight, part.flatten()[::stride].clone(), stride, groups[id(weight)]))

    def let_go(self) -> None:
        """It takes no step, or nobody asks."""
        self._samples = []

    def judge(self, optimizer: torch.optim.Optimizer) -> tuple[nn.Parameter, Observation] | None:
        """Return the update that is out of all proportion, None if none is."""
        samples, self._samples = self._samples, []
        moved = [found for sample in samples if (found := _moved(sample, optimizer.state.get(sample.weight, {}))) is not None]
        if not moved:
            return None
        device = moved[0].times.device
        worst = torch.stack([one.times.max().to(device) for one in moved]).tolist()  # in one transfer
        if max(worst) <= TOO_LARGE:
            return None
        found = moved[worst.index(max(worst))]
        return found.sample.weight, _observed(found, type(optimizer).__name__)


def infinite_state(optimizer: torch.optim.Optimizer) -> tuple[Tensor, str, tuple[int, ...]] | None:
    """Return the first state of a weight that is infinite somewhere, its name and the index of that; None if none is. In one transfer."""
    states = [
        (weight, name, part)
        for weight, state in optimizer.state.items()
        if isinstance(weight, Tensor) and isinstance(state, dict)
        for name, one in state.items()
        if isinstance(one, Tensor) and one.shape == weight.shape and one.dim() and (part := local(one)) is not None
    ]
    fine = torch.stack([is_finite(part).cpu() for *_, part in states]).tolist() if states else []
    for (weight, name, part), flag in zip(states, fine, strict=True):
        flat = None if flag else first_nonfinite(part)
        own = local(weight)
        if flat is None or own is None or own.shape != part.shape or not math.isinf(at(part, flat)):
            continue
        if math.isfinite(at(own.detach(), flat)):  # of a NaN, or of what is added to it, it becomes none
            return weight, str(name), unravel(flat, part.shape)
    return None


def huge_weights(weights: Iterable[tuple[str, nn.Parameter]], optimizers: Iterable[torch.optim.Optimizer]) -> str:
    """Say that the weights themselves are so large that a loss overflows because of them, and how far an update moves them; "" if they are
    not."""
    largest = [(largest_in(part.detach()), name) for name, one in weights if one.requires_grad and _is_fine(part := local(one))]
    most, name = max(largest, default=(0.0, ""))
    if most < HUGE:
        return ""
    rates = [group.get("lr") for optimizer in optimizers for group in optimizer.param_groups]
    known = [float(rate) for rate in rates if isinstance(rate, (float, int, Tensor))]
    by = f"; the learning rate is {number(max(known))} by now" if known else ""
    return f"the weights are huge themselves, up to {number(most)} in {name}: an update before, or the code itself, has made them so{by}"


def _is_fine(part: Tensor | None) -> TypeGuard[Tensor]:
    return part is not None and part.is_floating_point() and part.dtype.itemsize > 1 and bool(part.numel()) and bool(is_finite(part))


def _moved(sample: Sample, state: dict[str, Any]) -> Moved | None:
    """How far a weight went, beside the update that its state gives in float64, with squares that its mean can have come with."""
    group, step = sample.group, state.get("step")
    after, mean, squares = (sample.of(one) for one in (sample.weight, state.get(MEAN), state.get(SQUARES)))
    reach = _reach(*group.get("betas", (1.0, 1.0)))
    if after is None or mean is None or squares is None or step is None or not reach:
        return None
    before = sample.content.double()
    rate, count = (torch.as_tensor(one, device=after.device).double() for one in (group["lr"], step))
    decay, rounding = rate * group.get("weight_decay", 0.0), torch.finfo(sample.content.dtype).eps
    moved = (after - before).abs() - (decay + 2 * rounding) * before.abs()  # what rounding and weight decay have no hand in
    first, second = (1 - float(beta) ** count.clamp_min(1) for beta in group["betas"])
    least = torch.maximum(squares, (mean / reach).square())
    update = rate * (mean.abs() / first) / ((least / second).sqrt() + float(group.get("eps", 0.0)))
    times = torch.where((moved > TOO_LARGE * rate) & torch.isfinite(moved), moved / update, 0.0).nan_to_num(posinf=0.0)
    return Moved(sample, after - before, mean, squares, times)


def _reach(first: Any, second: Any) -> float:
    """The most that a mean of gradients comes to, in roots of the mean of their squares; 0 where nothing is known."""
    one, two = float(first), float(second)
    if not (0 <= one < 1 and 0 <= two < 1 and one * one < two):
        return 0.0
    return (1 - one) / math.sqrt(1 - two) / math.sqrt(1 - one * one / two)


def _observed(found: Moved, optimizer: str) -> Observation:
    place = int(found.times.argmax())
    flat, sample = place * found.sample.stride, found.sample
    mean, squares = float(found.mean[place]), float(found.squares[place])
    operands = ((MEAN, mean), (SQUARES, squares))
    words = f"{float(found.times[place]):.2g} times what float64 makes of the optimizer's state: no gradients give a mean of {number(mean)}"
    scale = f"{words} beside squares of {number(squares)}"
    return observe_update(sample.weight, flat, float(found.moved[place]), operands, sample.group, optimizer, scale)
