"""Updates in hooks on gradients: a weight is written to while backward goes on, and its gradient is let go of.

    def hook(p):
        p.data.add_(p.grad, alpha=-lr)
        p.grad = None

No optimizer steps, and what is written through `.data` no version tells: a few weights are looked at before and after.
"""

from __future__ import annotations

from collections.abc import Iterable
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from nanscope.program.local import local
from nanscope.program.numbers import is_finite
from nanscope.torch_inside import gradient_hooks
from nanscope.watching.left import spread

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes of an element


class Consumed:
    """Asked around each backward pass that comes to models which no optimizer updates. known: there was such an update."""

    def __init__(self) -> None:
        self.known = False
        self._few: WeakKeyDictionary[nn.Module, list[nn.Parameter]] = WeakKeyDictionary()
        self._before: list[tuple[nn.Parameter, Tensor]] = []

    def before(self, modules: Iterable[nn.Module]) -> None:
        """A backward pass begins. modules: that it comes to."""
        hooked = {id(one): one for module in modules for one in self._hooked(module)}.values()
        self._before = [(one, sums) for one in hooked if (sums := _sums(one)) is not None]

    def after(self) -> bool:
        """It has ended: has it written to weights, and let go of their gradients? Weights that are bad all over stay as they are."""
        before, self._before = self._before, []
        if not before or any(one.grad is not None for one, _ in before):
            return False
        moved = any((now := _sums(one)) is not None and bool(now != sums) for one, sums in before)
        bad = self.known and not all(bool(is_finite(one)) for one, _ in before)
        self.known |= moved
        return moved or bad

    def _hooked(self, module: nn.Module) -> list[nn.Parameter]:
        """A few of its weights from all over it that have hooks; looked for anew where these have none any more."""
        few = self._few.get(module)
        if not few or not all(map(gradient_hooks, few)):
            found = [one for one in module.parameters() if one.requires_grad and gradient_hooks(one)]
            few = self._few[module] = spread(found)
        return few

    def let_go(self) -> None:
        """Refer to no weight any more."""
        self._before = []
        self._few.clear()


def _sums(weight: Tensor) -> Tensor | None:
    """A number that is another one if any element is; of a NaN, too."""
    part = local(weight)
    kind = None if part is None else _BITS.get(part.element_size())
    return None if part is None or kind is None or part.is_complex() else part.detach().view(kind).sum(dtype=torch.int64)
