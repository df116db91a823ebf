"""Stands at the two gates of a step: the backward pass and the optimizer.

`torch.autograd.backward` has no hook, so it is wrapped for as long as a scope is open; optimizers are watched through torch's own
global step hooks. What a callback of ours raises never reaches the trainer, except the one exception that is meant to.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from nanscope.capture.failsafe import Failsafe
from nanscope.capture.source import variables


class Observer(Protocol):
    """Who is told; `nanscope.watching.scope.Scope` is one."""

    def before_backward(self, roots: list[Tensor], seeds: list[Tensor | None]) -> None: ...
    def after_backward(self) -> None: ...
    def before_step(self, optimizer: torch.optim.Optimizer) -> None: ...
    def after_step(self, optimizer: torch.optim.Optimizer) -> None: ...
    def elsewhere(self, what: str) -> None: ...


class Gates:
    """Installs the gates and calls the observer, from the thread that opened it only."""

    def __init__(self, observer: Observer, suspend: Callable[[], None], resume: Callable[[], None], failsafe: Failsafe) -> None:
        self._observer = observer
        self._suspend, self._resume, self._failsafe = suspend, resume, failsafe
        self._thread = threading.get_ident()
        self._handles: list[Any] = []
        self._wrapped: Any = None
        self._original: Any = None
        self._inside = False
        self._stepping: torch.optim.Optimizer | None = None  # between its two hooks; a step that raises never reaches the second
        self._suspended = False

    def install(self) -> None:
        """Put the gates up."""
        original = torch.autograd.backward

        @functools.wraps(original)
        def backward(tensors: Any, grad_tensors: Any = None, *args: Any, **kwargs: Any) -> None:
            if self._inside or self._elsewhere("a backward pass") or torch.compiler.is_compiling():
                return original(tensors, grad_tensors, *args, **kwargs)
            if not self._in_closure():
                self._end_step()
            self._inside = True
            self._failsafe("suspend", self._suspend)
            try:
                roots = [tensors] if isinstance(tensors, Tensor) else list(tensors)
                seeds = [grad_tensors] if grad_tensors is None or isinstance(grad_tensors, Tensor) else list(grad_tensors)
                self._failsafe("before-backward", self._observer.before_backward, roots, seeds)
                original(roots, grad_tensors, *args, **kwargs)
                self._failsafe("after-backward", self._observer.after_backward)
            finally:
                self._failsafe("resume", self._resume)
                self._inside = False
            return None

        self._original, self._wrapped = original, backward
        torch.autograd.backward = backward
        self._handles = [
            register_optimizer_step_pre_hook(self._before_step),
            register_optimizer_step_post_hook(self._after_step),
        ]

    def remove(self) -> None:
        """Take the gates down. A wrapper that somebody put over ours stays; ours then only passes calls on."""
        for handle in reversed(self._handles):
            handle.remove()
        self._handles = []
        if torch.autograd.backward is self._wrapped:
            torch.autograd.backward = self._original
        self._inside = True

    def rest(self) -> None:
        """Let everything pass from now on."""
        self._inside = True

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Let calls and backward passes of our own go past the instruments."""
        inside, self._inside = self._inside, True
        self._failsafe("suspend", self._suspend)
        try:
            yield
        finally:
            self._failsafe("resume", self._resume)
            self._inside = inside

    def _elsewhere(self, what: str) -> bool:
        """Is this done by another thread? It is not watched then, and told."""
        if threading.get_ident() == self._thread:
            return False
        self._failsafe(
            "before-backward", self._observer.elsewhere, f"{what} in thread {threading.current_thread().name}, which was not watched"
        )
        return True

    def _in_closure(self) -> bool:
        """Is the optimizer whose step began still running? It then calls back for the loss; a step that raised is over."""
        frame = sys._getframe(1) if self._stepping is not None else None
        while frame is not None:
            if variables(frame).get("self") is self._stepping:
                return True
            frame = frame.f_back
        return False

    def _end_step(self) -> None:
        if self._stepping is not None:
            self._stepping = None
            if self._suspended:
                self._failsafe("resume", self._resume)

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if self._inside or self._elsewhere("an optimizer step") or torch.compiler.is_compiling():
            return
        self._end_step()
        closure = any(value is not None for value in (*args[1:], *kwargs.values()))
        self._suspended = not closure  # a closure computes its loss inside the step: then the tape stays awake
        if self._suspended:
            self._failsafe("suspend", self._suspend)
        self._stepping = optimizer
        try:
            self._ours("before-step", self._observer.before_step, optimizer)
        except BaseException:
            self._end_step()
            raise

    def _after_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if threading.get_ident() != self._thread or torch.compiler.is_compiling() or self._stepping is None:
            return
        try:
            self._ours("after-step", self._observer.after_step, optimizer)
        finally:
            self._end_step()

    def _ours(self, what: str, function: Callable[..., None], *args: Any) -> None:
        """Call the observer; the backward passes that it runs are its own and go past the gate."""
        with self.aside():
            self._failsafe(what, function, *args)
