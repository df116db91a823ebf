"""What a loss is multiplied by against underflow, by a GradScaler or by hand. Whoever does that also skips steps that overflow."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from nanscope.program.calls import Ref
from nanscope.program.program import Program
from nanscope.torch_inside import loss_scale

BY_HAND = 256.0  # a loss multiplied by this or more is scaled against underflow
LOW = 16.0  # a gradient that overflows half precision at this scale is above 4,000 without it: no scale is to blame
IN_A_ROW = 64  # a scale that is halved as often is below 1, wherever it began


@dataclass(frozen=True, slots=True)
class LossScale:
    """What one loss was multiplied by. factor: on the scaler's device until somebody asks. scaler: None if it was done by hand."""

    factor: float | Tensor
    scaler: torch.amp.GradScaler | None = None

    def is_low(self) -> bool:
        """Is it too low to make anything overflow?"""
        return float(self.factor) <= LOW

    def backed_off(self) -> bool:
        """Has the scaler lowered its scale since, as it does when it has skipped a step?"""
        now = None if self.scaler is None else loss_scale(self.scaler)
        return now is not None and float(now) < float(self.factor)


def scale_of(program: Program | None, tensors: Mapping[int, Tensor], scaler: torch.amp.GradScaler | None) -> LossScale | None:
    """Return what the loss was multiplied by, None if by nothing. scaler: one that multiplied something since the last backward pass."""
    now = None if scaler is None else loss_scale(scaler)
    if now is not None:
        return LossScale(now.detach().clone(), scaler)  # its own is written to in place
    factor = _by_hand(program, tensors)
    return None if factor is None else LossScale(factor)


def unscaled(program: Program) -> Program | None:
    """Return the program of a scaled loss up to where it is multiplied by the scale, None if that is not seen."""
    for call in reversed(program.calls):
        if call.name == "mul":
            read = [arg.id for arg in call.args if isinstance(arg, Ref)]
            loss = next((value for value in read if (leaf := program.leaf(value)) is None or leaf.diff), None)
            return None if loss is None else program.slice(loss)
    return None


def _by_hand(program: Program | None, tensors: Mapping[int, Tensor]) -> float | None:
    """Return the large constant that the last thing done to the loss was a multiplication by."""
    if program is None or not program.calls or program.calls[-1].name != "mul":
        return None
    for arg in program.calls[-1].args:
        factor: object = arg
        if isinstance(arg, Ref) and arg.id in tensors and tensors[arg.id].numel() == 1 and tensors[arg.id].is_cpu:
            factor = float(tensors[arg.id].detach())  # elsewhere reading it would wait for the device in every step
        if isinstance(factor, (int, float)) and factor >= BY_HAND:
            return float(factor)
    return None


class Search:
    """How long a scaler has been looking for a scale that fits. skipped: steps in a row."""

    def __init__(self) -> None:
        self.skipped = 0
        self.stuck = False  # no scale fits: what it skips is no overflow of the scale

    def skip(self, scale: LossScale) -> None:
        """Another step was skipped."""
        self.skipped += 1
        now = None if scale.scaler is None else loss_scale(scale.scaler)
        self.stuck = self.skipped >= IN_A_ROW or (now is not None and float(now) < 1.0)

    def found(self) -> None:
        """A step was taken."""
        self.skipped, self.stuck = 0, False
