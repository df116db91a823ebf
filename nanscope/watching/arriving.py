"""Gradients as they come to weights, before hooks of the trainer's change them there.

    parameter.register_hook(lambda grad: grad.nan_to_num())

Such a gradient is seen by nobody else: what the optimizer steps on is finite. It counts as one that the loop has replaced.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from weakref import WeakKeyDictionary

from torch import Tensor, nn

from nanscope.capture.failsafe import Failsafe
from nanscope.capture.replacing import Replacing
from nanscope.capture.unseen import unseen
from nanscope.torch_inside import call_first, gradient_hooks, hooks_on_arrival, hooks_once_there

FRESH = 64  # backward passes, after which it is looked again which weights a model has


class Arriving:
    """Asked around each backward pass."""

    def __init__(self, replacing: Replacing, failsafe: Failsafe) -> None:
        self._replacing, self._failsafe = replacing, failsafe
        self._weights: WeakKeyDictionary[nn.Module, list[nn.Parameter]] = WeakKeyDictionary()
        self._passes = 0
        self._undo: list[Callable[[], None]] = []

    def before(self, models: Iterable[nn.Module]) -> None:
        """A backward pass begins that may come to the weights of these."""
        self.after()  # of one that has not come to its end
        self._passes += 1
        if self._passes % FRESH == 0:
            self._weights.clear()
        hooked = {id(one): one for model in models for one in self._weights_of(model) if gradient_hooks(one)}
        for weight in hooked.values():
            if on_arrival := hooks_on_arrival(weight):
                self._undo.append(call_first(on_arrival, self._failsafe.door("arriving", self._comes_to(weight))))
            elif once_there := hooks_once_there(weight):
                self._undo.append(call_first(once_there, self._failsafe.door("arriving", self._is_there)))

    def after(self) -> None:
        """It has ended: leave the hooks as they were."""
        while self._undo:
            self._undo.pop()()

    def let_go(self) -> None:
        """Refer to no weight any more."""
        self.after()
        self._weights.clear()

    def _weights_of(self, model: nn.Module) -> list[nn.Parameter]:
        known = self._weights.get(model)
        if known is None:
            known = self._weights[model] = [weight for weight in model.parameters() if weight.requires_grad]
        return known

    def _comes_to(self, weight: nn.Parameter) -> Callable[[Tensor], None]:
        def comes(grad: Tensor) -> None:
            with unseen():
                self._replacing.came(weight, grad)

        return comes

    def _is_there(self, weight: nn.Parameter) -> None:
        if weight.grad is not None:
            with unseen():
                self._replacing.came(weight, weight.grad)
