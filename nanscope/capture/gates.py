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
from collections.abc import Callable, Mapping
from types import FunctionType
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from nanscope.capture.compiler import called_for_real, never_compile
from nanscope.capture.failsafe import Failsafe
from nanscope.capture.mode import TapeMode
from nanscope.capture.source import variables
from nanscope.capture.threads import Strand, Threads
from nanscope.capture.unseen import OURS, is_ours, is_traced
from nanscope.capture.update import remember
from nanscope.torch_inside import count_function_modes, is_transformed, running_backward


class Gates:
    """Installs the gates, and tells the observer of the thread that comes to one."""

    def __init__(self, threads: Threads, failsafe: Failsafe) -> None:
        self._threads, self._failsafe = threads, failsafe
        self._differentiate: WeakSet[torch.optim.Optimizer] = WeakSet()  # optimizers that take gradients themselves

    def install(self, undo: contextlib.ExitStack) -> None:
        """Put the gates up. undo: takes them down; a wrapper that somebody put over ours stays, and ours then only passes calls on."""
        original, here = torch.autograd.backward, self._threads.here

        @functools.wraps(original)
        def backward(*args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling() or here.strand.inside or self._threads.resting or OURS.get():
                return original(*args, **kwargs)
            strand = here.strand
            if strand.eyes is None:
                self._failsafe("thread", self._threads.begin)
                if strand.eyes is None:
                    return original(*args, **kwargs)
            strand.inside = True
            strand.passes += 1
            try:
                self._failsafe("before-backward", self._begin, strand, args, kwargs)
                # a function mode is told by torch what the name stands for
                function = _named_so(original) if count_function_modes() > 0 else original
                try:
                    result = function(*args, **kwargs)
                except BaseException as error:
                    self._failsafe("after-backward", self._told, strand, error)
                    raise
                self._failsafe("after-backward", self._told, strand)
            finally:
                strand.inside = False
                self._failsafe("resume", self._end, strand)
            return result

        def take_down() -> None:
            if torch.autograd.backward is backward:
                torch.autograd.backward = original

        for function in (backward, _named_so):
            never_compile(function, nested=False)  # what torch's own calls, it may compile
        undo.callback(take_down)
        torch.autograd.backward = backward
        told = self._failsafe.door("gate", self._before_step)

        def before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
            told(optimizer, args, kwargs)
            given: list[Any] = []
            self._failsafe("closure", lambda: given.append(self._with_closures(optimizer, args, kwargs)))
            return given[0] if given else None

        after_step = self._failsafe.door("gate", self._after_step)
        for hook in (before_step, after_step):
            called_for_real(hook)
        undo.callback(register_optimizer_step_pre_hook(before_step).remove)
        undo.callback(register_optimizer_step_post_hook(after_step).remove)

    def _begin(self, strand: Strand, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        eyes = strand.eyes
        if eyes is None or is_traced() or is_transformed():  # there torch refuses
            return
        if not _in_closure(strand.stepping):
            self._end_step(strand)
        self._failsafe("suspend", eyes.mode.sleep, "backward")
        eyes.modules.reset()
        eyes.modules.busy = True
        with self._threads.aside():
            roots, seeds = _roots(args, kwargs)
            if roots:
                with self._threads.alone(strand):
                    self._failsafe("pass-on", self._threads.go_on, strand, roots)
                    self._tell(strand.by, (strand.by.eyes or eyes).observer.before_backward, roots, seeds, _is_kept(args, kwargs))

    def _told(self, strand: Strand, raised: BaseException | None = None) -> None:
        if strand.eyes is not None:
            strand.eyes.modules.busy = False
            with self._threads.aside():
                self._tell(strand.by, (strand.by.eyes or strand.eyes).observer.after_backward, raised)

    def _end(self, strand: Strand) -> None:
        if strand.eyes is not None:
            strand.eyes.modules.busy = False
            strand.eyes.mode.wake("backward")
        strand.by = strand

    def _tell(self, strand: Strand, act: Callable[..., None], *args: Any) -> None:
        """Tell an observer, unless the block was left meanwhile by another thread."""
        with strand.lock:
            if not self._threads.resting:
                act(*args)

    def _end_step(self, strand: Strand) -> None:
        strand.stepping, strand.of = None, strand
        if strand.eyes is not None:
            self._failsafe("resume", strand.eyes.mode.wake, "step")

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        strand = self._threads.here.strand
        if self._threads.resting or is_ours():
            return
        if strand.inside or running_backward() != -1:
            self._before_step_inside(optimizer)
            return
        self._threads.begin()
        eyes = strand.eyes
        if eyes is None:
            self._threads.missed("other-thread", f"an optimizer step in thread {strand.thread.name}, which was not watched")
            return
        self._end_step(strand)
        closure = any(map(callable, (*args[1:], *kwargs.values())))
        if len(args) > 1 or kwargs:
            self._failsafe("before-step", remember, optimizer, args[1:], kwargs)
        if optimizer not in self._differentiate:
            self._failsafe("suspend", eyes.mode.sleep, "step")  # a closure computes its loss inside the step, and wakes the tape for it
        strand.stepping = optimizer
        try:
            with self._threads.aside():
                self._failsafe("pass-on", self._threads.find_maker, strand, optimizer, closure)
                self._failsafe("before-step", self._tell, strand.of, (strand.of.eyes or eyes).observer.before_step, optimizer, closure)
        except BaseException:
            self._end_step(strand)
            raise

    def _with_closures(self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return what the step is given, with closures that the tape listens to; None if there are none: what else an optimizer computes,
        and L-BFGS computes hundreds of products a closure, is no loss.

        One whose closure differentiates nothing does that itself: it is listened to until its step is over, and from then on always.
        """
        strand = self._threads.here.strand
        if strand.stepping is not optimizer or not any(map(callable, (*args[1:], *kwargs.values()))):
            return None
        given = [self._heard(strand, optimizer, one) if callable(one) else one for one in args[1:]]
        return (*args[:1], *given), {key: self._heard(strand, optimizer, one) if callable(one) else one for key, one in kwargs.items()}

    def _heard(self, strand: Strand, optimizer: torch.optim.Optimizer, closure: Callable[..., Any]) -> Callable[..., Any]:
        woken: list[tuple[TapeMode, int]] = []

        def wake() -> None:
            if strand.eyes is not None and strand.stepping is optimizer and strand.is_mine:
                strand.eyes.mode.wake("step")
                woken.append((strand.eyes.mode, strand.passes))

        def sleep(answer: object) -> None:
            mode, passes = woken.pop()
            if strand.passes == passes and isinstance(answer, Tensor) and answer.requires_grad:
                self._differentiate.add(optimizer)
            if strand.stepping is optimizer and optimizer not in self._differentiate:
                mode.sleep("step")

        @functools.wraps(closure)
        def heard(*args: Any, **kwargs: Any) -> Any:
            before, answer = len(woken), None  # a closure may be called within itself
            self._failsafe("resume", wake)
            try:
                answer = closure(*args, **kwargs)
                return answer
            finally:
                if len(woken) > before:
                    self._failsafe("suspend", sleep, answer)

        return heard

    def _before_step_inside(self, optimizer: torch.optim.Optimizer) -> None:
        strand, here = self._threads.inside(optimizer), threading.current_thread().name
        eyes = None if strand is None else strand.by.eyes
        if strand is None or eyes is None:
            self._threads.missed("other-thread", f"an optimizer step in thread {here}, which was not watched")
            return
        with self._threads.aside():
            self._failsafe("before-step", self._tell, strand.by, eyes.observer.before_step_inside, optimizer)

    def _after_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        strand = self._threads.here.strand
        eyes = strand.of.eyes
        if strand.stepping is None or eyes is None or is_ours():
            return
        try:
            with self._threads.aside():
                self._failsafe("after-step", self._tell, strand.of, eyes.observer.after_step, optimizer)
        finally:
            self._end_step(strand)


def _in_closure(stepping: torch.optim.Optimizer | None) -> bool:
    """Is the optimizer whose step began still running? It then calls back for the loss; a step that raised is over."""
    frame = sys._getframe(1) if stepping is not None else None
    while frame is not None:
        if variables(frame).get("self") is stepping:
            return True
        frame = frame.f_back
    return False


def _named_so(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return torch's function as it is where no wrapper of ours stands under its name: what it tells others of itself is itself."""
    if not isinstance(function, FunctionType) or function.__globals__.get(function.__name__) is function:
        return function
    around = {**function.__globals__, function.__name__: function}
    twin = FunctionType(function.__code__, around, function.__name__, function.__defaults__, function.__closure__)
    twin.__kwdefaults__ = function.__kwdefaults__
    return twin


def _is_kept(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """May the graph be differentiated again?"""
    given = {**dict(zip(("tensors", "grad_tensors", "retain_graph", "create_graph"), args, strict=False)), **kwargs}
    return bool(given.get("create_graph") if given.get("retain_graph") is None else given["retain_graph"])


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
