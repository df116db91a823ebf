"""Stands at the two gates of a step: the backward pass and the optimizer.

`torch.autograd.backward` has no hook, so it is wrapped for as long as a scope is open; optimizers are watched through torch's own
global step hooks. What a callback of ours raises never reaches the trainer, except the one exception that is meant to; what the trainer's
own call raises passes as it was raised.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from nanscope.capture.compiler import called_for_real, never_compile
from nanscope.capture.failsafe import Failsafe
from nanscope.capture.modules import ModuleWatch
from nanscope.capture.source import variables
from nanscope.capture.tape import TapeMode
from nanscope.capture.unseen import is_ours, is_traced, unseen


class Observer(Protocol):
    """Who is told; `nanscope.watching.step.Step` is one."""

    def before_backward(self, roots: list[Tensor], seeds: list[Tensor | None]) -> None: ...
    def after_backward(self) -> None: ...
    def before_step(self, optimizer: torch.optim.Optimizer) -> None: ...
    def after_step(self, optimizer: torch.optim.Optimizer) -> None: ...
    def passed_over(self) -> None: ...
    def elsewhere(self, what: str) -> None: ...


class Gates:
    """Installs the gates and calls the observer, from the thread that opened it only."""

    def __init__(self, observer: Observer, mode: TapeMode, modules: ModuleWatch, failsafe: Failsafe) -> None:
        self._observer = observer
        self._mode, self._modules, self._failsafe = mode, modules, failsafe
        self._thread = threading.get_ident()
        self._inside = False
        mode.tape.doubts.again = self._passed_over
        self._stepping: torch.optim.Optimizer | None = None  # between its two hooks; a step that raises never reaches the second

    def install(self, undo: contextlib.ExitStack) -> None:
        """Put the gates up. undo: takes them down; a wrapper that somebody put over ours stays, and ours then only passes calls on."""
        original = torch.autograd.backward

        @functools.wraps(original)
        def backward(*args: Any, **kwargs: Any) -> Any:
            if self._inside or torch.compiler.is_compiling() or is_ours():
                return original(*args, **kwargs)
            if threading.get_ident() != self._thread:
                self._failsafe("before-backward", self._elsewhere, "a backward pass")
                return original(*args, **kwargs)
            self._inside = True
            ours = torch.autograd.backward is backward and torch._C._len_torch_function_stack() > 0
            try:
                self._failsafe("before-backward", self._begin, args, kwargs)
                if ours:
                    torch.autograd.backward = original  # a function mode is told by torch what the name stands for
                result = original(*args, **kwargs)
                self._failsafe("after-backward", self._told)
            finally:
                if ours:
                    torch.autograd.backward = backward
                self._inside = False
                self._failsafe("resume", self._end)
            return result

        def take_down() -> None:
            self._inside = True
            if torch.autograd.backward is backward:
                torch.autograd.backward = original

        never_compile(backward, nested=False)  # what torch's own calls, it may compile
        undo.callback(take_down)
        torch.autograd.backward = backward
        for register, act in (
            (register_optimizer_step_pre_hook, self._before_step),
            (register_optimizer_step_post_hook, self._after_step),
        ):
            hook = self._failsafe.door("gate", act)
            called_for_real(hook)
            undo.callback(register(hook).remove)

    def rest(self) -> None:
        """Let everything pass from now on."""
        self._inside = True

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """Do work of our own: its calls and backward passes go past every instrument, ours and the trainer's."""
        inside, self._inside = self._inside, True
        busy, self._modules.busy = self._modules.busy, True
        fresh = "aside" not in self._mode.sleeping
        self._failsafe("suspend", self._mode.sleep, "aside")
        try:
            with unseen():
                yield
        finally:
            self._inside, self._modules.busy = inside, busy
            if fresh:
                self._failsafe("resume", self._mode.wake, "aside")

    def _begin(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        if is_traced() or torch._C._are_functorch_transforms_active():  # there torch refuses
            return
        if not self._in_closure():
            self._end_step()
        self._failsafe("suspend", self._mode.sleep, "backward")
        self._modules.reset()
        self._modules.busy = True
        with self.aside():
            roots, seeds = _roots(args, kwargs)
            if roots:
                self._observer.before_backward(roots, seeds)

    def _told(self) -> None:
        self._modules.busy = False
        with self.aside():
            self._observer.after_backward()

    def _end(self) -> None:
        self._modules.busy = False
        self._mode.wake("backward")

    def _passed_over(self) -> None:
        with self.aside():
            self._failsafe("passed-over", self._observer.passed_over)

    def _elsewhere(self, what: str) -> None:
        """Tell what another thread does: it is not watched."""
        self._observer.elsewhere(f"{what} in thread {threading.current_thread().name}, which was not watched")

    def _in_closure(self) -> bool:
        """Is the optimizer whose step began still running? It then calls back for the loss; a step that raised is over."""
        frame = sys._getframe(1) if self._stepping is not None else None
        while frame is not None:
            if variables(frame).get("self") is self._stepping:
                return True
            frame = frame.f_back
        return False

    def _end_step(self) -> None:
        self._stepping = None
        self._failsafe("resume", self._mode.wake, "step")

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if self._inside or is_ours():
            return
        if threading.get_ident() != self._thread:
            self._elsewhere("an optimizer step")
            return
        self._end_step()
        if all(value is None for value in (*args[1:], *kwargs.values())):
            self._failsafe("suspend", self._mode.sleep, "step")  # a closure computes its loss inside the step: then the tape stays awake
        self._stepping = optimizer
        try:
            with self.aside():
                self._failsafe("before-step", self._observer.before_step, optimizer)
        except BaseException:
            self._end_step()
            raise

    def _after_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if self._stepping is None or threading.get_ident() != self._thread or is_ours():
            return
        try:
            with self.aside():
                self._failsafe("after-step", self._observer.after_step, optimizer)
        finally:
            self._end_step()


def _roots(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[list[Tensor], list[Tensor | None]]:
    """Return what is differentiated, and what for: nothing if torch will refuse it.

    What cannot be known, since it is no tensor or an iterator that only torch may empty, is stood for by an empty tensor.
    """
    given = dict(zip(("tensors", "grad_tensors"), args, strict=False))
    tensors, seeds = (given.get(name, kwargs.get(name)) for name in ("tensors", "grad_tensors"))
    seeds = kwargs.get("grad_variables") if seeds is None else seeds
    roots = list(tensors) if isinstance(tensors, (list, tuple)) and not isinstance(tensors, GradientEdge) else [tensors]
    if any(root is None or isinstance(root, (str, bytes, int, float)) for root in roots):
        return [], []
    nothing = torch.empty(0)
    weights = seeds if isinstance(seeds, (list, tuple)) else [seeds]
    if not all(isinstance(root, Tensor) for root in roots):
        weights = [nothing]
    return (
        [root if isinstance(root, Tensor) else nothing for root in roots],
        [weight if weight is None or isinstance(weight, Tensor) else nothing for weight in weights],
    )
