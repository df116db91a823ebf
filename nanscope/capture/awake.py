"""Whether a model is listened to while it is called, or the tape sleeps meanwhile: in the first steps of a run, and in one of many after.

It is left alone where listening is not safe, or would tell nothing: without gradients, in a transform, where its weights are spread over
ranks, and where code that torch compiles would have to be compiled anew.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from nanscope.capture.depth import Depth, Heard
from nanscope.capture.mode import TapeMode
from nanscope.capture.unseen import unseen
from nanscope.program.local import is_plain
from nanscope.torch_inside import COMPILED_CALL, compiles_backward, is_flat, transform, uncompiled

FIRST = 3  # steps of a run that are looked at deeply, whatever comes after them

SPREAD = ("FSDP", "FullySharded", "DeepSpeed")  # how classes of modules begin whose weights come and go
MODULE = "module"  # why a mode sleeps


class Awake:
    """Of one thread. every: one of so many steps is a deep one, none if that is 0. step: which one runs, or is to come, from 1."""

    def __init__(self, mode: TapeMode, every: int) -> None:
        self.step: Callable[[], int] = lambda: 1
        self._mode, self._every = mode, every
        self._depth = Depth()

    @property
    def is_due(self) -> bool:
        """Is the running step, or the one to come, a deep one?"""
        return self._every > 0 and (self.step() <= FIRST or self.step() % self._every == 0)

    def begin(self, module: nn.Module) -> None:
        """An outermost module is called."""
        if self.is_due and torch.is_grad_enabled():
            with unseen():
                listens = is_open(module)
                self._depth.begin()
            self._mode.depth = self._depth if listens else None
        if self._mode.depth is None:
            self._mode.sleep(MODULE)

    def end(self) -> None:
        """It has returned, or raised."""
        self._mode.depth = None
        self._mode.wake(MODULE)

    def take(self) -> Heard | None:
        """A backward pass begins: return what was heard of the models before it, None if the step is no deep one."""
        return self._depth.take() if self.is_due else None


def is_open(module: nn.Module) -> bool:
    """May a module be listened to while it is called?"""
    if transform() is not None or compiles_backward():
        return False
    if any(not is_plain(weight) or is_flat(weight) or hasattr(weight, "ds_id") for weight in module.parameters()):
        return False
    return not any(_is_closed(part) for part in module.modules())


def _is_closed(part: nn.Module) -> bool:
    is_compiled = uncompiled(part) is not None or getattr(part, COMPILED_CALL, None) is not None
    return is_compiled or type(part).__name__.startswith(SPREAD)
