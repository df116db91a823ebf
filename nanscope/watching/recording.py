"""One backward pass as it was recorded: its program, its edge to the model, and flags that stay on the device until somebody asks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from nanscope.capture import kernels
from nanscope.capture.custom import Backward
from nanscope.capture.modules import ModuleCall
from nanscope.capture.tape import Taken
from nanscope.frameworks.live import Glimpse
from nanscope.program.calls import Ref
from nanscope.program.numbers import is_finite
from nanscope.program.ops import base_name
from nanscope.program.program import Program


def finite_batch(recording: Recording) -> list[Tensor]:
    """Return, for a kernel that drops NaN, whether each part of its batch is finite: bool scalars, still on the device."""
    found = kernels.kernel_of(recording.glimpses)
    if found is None or not found[0].drops_nan:
        return []
    parts = [recording.taken[name].content() for name, _ in found[0].tensors if name in recording.taken]
    return [is_finite(part) for part in parts if part is not None and part.is_floating_point()]


HIDDEN = -1  # stands among the leaves for what a kernel was given of the model


@dataclass(slots=True)
class Recording:
    """One backward pass: the program that led to it, and what is needed to look closer.

    program: None if the loss was not recorded. flags: bool scalars, true where the loss or a gradient at its edge is finite; they stay on
    the device until somebody asks. grads: leaf id → gradient. scaled: a GradScaler multiplied the loss. glimpses: what was seen of the
    frameworks' loss functions. backwards: of custom autograd functions, where they may have spoilt a gradient. taken: arguments of a kernel
    among the functions, by name. given: as `flags`, of a batch that a kernel was given
    which drops NaN.
    """

    program: Program | None
    tensors: dict[int, Tensor]
    loss: Tensor
    calls: list[ModuleCall]
    scaled: bool
    flags: list[Tensor] = field(default_factory=list)
    grads: dict[int, Tensor] = field(default_factory=dict)
    examined: bool = False
    given: list[Tensor] = field(default_factory=list)
    glimpses: tuple[Glimpse, ...] = ()
    taken: dict[str, Taken] = field(default_factory=dict)
    backwards: list[Backward] = field(default_factory=list)

    def hidden(self) -> Tensor | None:
        """What a kernel was given of the model, None if there was no kernel or it was not held."""
        found = kernels.kernel_of(self.glimpses)
        taken = self.taken.get(found[0].hidden) if found is not None else None
        return taken.content() if taken is not None else None

    def edge(self) -> dict[int, Tensor]:
        """Return what the loss reads: the leaves of the program, and what a kernel was given of the model, as HIDDEN."""
        hidden = self.hidden()
        return self.tensors if hidden is None else {**self.tensors, HIDDEN: hidden}

    @property
    def value(self) -> float | None:
        """The loss as a number, None if it is not a scalar."""
        return float(self.loss) if self.loss.numel() == 1 else None


BY_HAND = 256.0  # a loss multiplied by this or more is scaled against underflow; whoever does that also skips steps that overflow


def scaled_by_hand(program: Program | None, tensors: Mapping[int, Tensor]) -> bool:
    """Is the last thing done to the loss a multiplication by a large constant?"""
    if program is None or not program.calls or base_name(program.calls[-1].op) != "mul":
        return False
    for arg in program.calls[-1].args:
        factor: object = arg
        if isinstance(arg, Ref) and arg.id in tensors and tensors[arg.id].numel() == 1 and tensors[arg.id].is_cpu:
            factor = float(tensors[arg.id])  # elsewhere reading it would wait for the device in every step
        if isinstance(factor, (int, float)) and factor >= BY_HAND:
            return True
    return False
