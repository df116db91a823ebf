"""The threads that train: each has a tape of its own. A step belongs to weights, and is with the thread that last differentiated for them.

A dispatch mode stands on the stack of one thread. On that of the thread which enters the block it is put then; any other gets one when it
first calls a module that has weights, differentiates, or steps an optimizer. Where autograd runs a backward pass on a thread of its own
nobody trains, and threads that do nothing of the kind are left alone.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass
from typing import Protocol, Self

import torch
from torch import Tensor

from nanscope.capture.failsafe import Failsafe
from nanscope.capture.mode import TapeMode
from nanscope.capture.modules import ModuleWatch, Own
from nanscope.capture.tape import Tape
from nanscope.capture.unseen import is_ours, is_traced, unseen
from nanscope.errors import Deliberate
from nanscope.torch_inside import is_transformed, running_backward

PATIENCE = 5.0  # seconds that a thread which is looking at something is waited for
LEFT_OFF = 8  # threads that have ended amid a step of which it is remembered where they were


class Observer(Protocol):
    """Who is told what a thread does; `nanscope.watching.step.Step` is one."""

    @property
    def number(self) -> int: ...
    @property
    def runs(self) -> bool: ...
    @property
    def is_nobodys(self) -> bool: ...
    def rests(self) -> bool: ...
    def reaches(self, weights: Set[int]) -> bool: ...
    def made(self, weights: Set[int]) -> bool: ...
    def goes_on_from(self, other: Self) -> bool: ...
    def take_over(self, other: Self) -> None: ...
    def begin_beside(self, other: Self) -> None: ...
    def join(self, other: Self) -> None: ...
    def measured_in(self, other: Self) -> None: ...
    def before_backward(self, roots: list[Tensor], seeds: list[Tensor | None], kept: bool) -> None: ...
    def after_backward(self, raised: BaseException | None = None) -> None: ...
    def before_step_inside(self, optimizer: torch.optim.Optimizer) -> None: ...
    def before_step(self, optimizer: torch.optim.Optimizer, closure: bool) -> None: ...
    def after_step(self, optimizer: torch.optim.Optimizer) -> None: ...
    def passed_over(self) -> None: ...
    def refused(self, args: tuple[object, ...], error: Exception) -> None: ...
    def finish(self, raised: str = "", thread: bool = False, error: BaseException | None = None) -> None: ...
    def forget(self) -> None: ...
    def let_go(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Instruments:
    """What one thread is watched with."""

    mode: TapeMode
    modules: ModuleWatch
    observer: Observer

    def forget(self) -> None:
        """Let go of all that is held."""
        self.observer.forget()
        self.modules.forget()
        self.mode.tape.forget(everything=True)

    def let_go(self) -> None:
        """Let go of all that is held of tensors, amid whatever runs."""
        self.observer.let_go()
        self.modules.let_go()
        self.mode.tape.forget(everything=True)
        self.mode.tape.agreed.let_go()


class Strand:
    """One thread, as the gates see it.

    inside: its backward pass runs. passes: begun so far. stepping: the optimizer between its two hooks; a step that raises never reaches
    the second.
    by, of: the thread that has recorded what it differentiates, and that which has made what it steps on. eyes: what it is watched with,
    None while it is not. lock: held while its observer is told something.
    """

    __slots__ = ("by", "eyes", "inside", "lock", "of", "passes", "stepping", "thread")

    def __init__(self) -> None:
        self.thread = threading.current_thread()
        self.inside = False
        self.passes = 0
        self.stepping: torch.optim.Optimizer | None = None
        self.by = self.of = self
        self.eyes: Instruments | None = None
        self.lock = threading.RLock()

    @property
    def is_mine(self) -> bool:
        """Is it the thread that asks?"""
        return self.thread is threading.current_thread()

    @contextlib.contextmanager
    def held(self) -> Iterator[bool]:
        """Hold its lock, unless that takes too long: whoever it waits for may be waiting for us."""
        held = self.lock.acquire(timeout=-1 if self.is_mine else PATIENCE)
        try:
            yield held
        finally:
            if held:
                self.lock.release()


class Here(Own):
    """What a thread knows of itself."""

    def __init__(self) -> None:
        self.strand = Strand()


class Threads:
    """The threads that are watched.

    make: makes the instruments of another one. missed: is told slug and words of what nobody saw. resting: nobody is told anything.
    """

    def __init__(self, make: Callable[[], Instruments], failsafe: Failsafe, missed: Callable[[str, str], None]) -> None:
        self.here = Here()
        self.resting = True
        self.missed = missed
        self._make, self._failsafe = make, failsafe
        self._watched: list[Strand] = []
        self._budget = 0  # bytes, for all
        self._lock = threading.Lock()
        self._passing = threading.RLock()  # held while a step goes from one thread to another, or may begin in two of them

    def enter(self, eyes: Instruments, undo: contextlib.ExitStack) -> None:
        """Watch the thread that enters the block. undo: lets all threads go."""
        self._budget = eyes.mode.tape.budget
        undo.callback(self._retire)
        eyes.mode.install(undo)
        self._add(eyes)
        self.resting = False

    def begin(self) -> None:
        """Watch this thread from now on, if it is one of the trainer's and not watched so far."""
        strand = self.here.strand
        if strand.eyes is not None or self.resting or is_ours() or is_traced():
            return
        if running_backward() != -1 or is_transformed():
            return
        with self.aside():
            self._sweep()
            eyes = self._make()
        self._add(eyes)
        eyes.mode.slip_under()

    def go_on(self, strand: Strand, roots: Sequence[Tensor]) -> None:
        """A backward pass is about to begin: if another thread has begun a step for these weights, it belongs to that.

        roots: what is differentiated; another thread may have recorded it.
        """
        others = self._others(strand)
        if others and not _knows(strand, roots):
            strand.by = strand = next((other for other in others if _knows(other, roots)), strand)
            others = self._others(strand)
        eyes = strand.eyes
        for other in others:
            if eyes is not None and other.eyes is not None and eyes.observer.goes_on_from(other.eyes.observer):
                self._pass_on(strand, other, eyes.observer.begin_beside if other.inside else eyes.observer.take_over)

    @contextlib.contextmanager
    def alone(self, strand: Strand) -> Iterator[None]:
        """Let no other thread begin or take over a step meanwhile; where one does that for long, it may be waiting for us."""
        held = bool(self._others(strand)) and self._passing.acquire(timeout=PATIENCE)
        try:
            yield
        finally:
            if held:
                self._passing.release()

    def find_maker(self, strand: Strand, optimizer: torch.optim.Optimizer, closure: bool) -> None:
        """Find out whose step it is that an optimizer takes: of the thread that has made its gradients, whichever calls it.

        closure: it will differentiate itself. Gradients that nobody has made are copies of such that no other optimizer steps on.
        """
        others = self._others(strand)
        if not others:
            strand.of = strand
            return
        weights = _graded(optimizer)
        seen = {strand: strand.eyes.observer} if strand.eyes is not None else {}
        seen |= {other: other.eyes.observer for other in others if other.eyes is not None}
        made = [one for one, observer in seen.items() if observer.made(weights)] if weights else []
        if not made and weights and not (strand in seen and seen[strand].runs):
            made = [one for one, observer in seen.items() if observer.is_nobodys]
            made = made if len(made) == 1 else []
        owner = min(made, key=lambda one: not seen[one].runs, default=strand)
        for other in made:
            if other is not owner:
                self._pass_on(owner, other, seen[owner].join)
        if owner is not strand:
            self._pass_on(owner, strand, seen[owner].measured_in)
            if closure:
                self._pass_on(strand, owner, seen[strand].take_over)
                return
        strand.of = owner

    def inside(self, optimizer: torch.optim.Optimizer) -> Strand | None:
        """Return the thread in whose backward pass an optimizer steps: on a GPU autograd calls its hooks in threads of its own."""
        strand = self.here.strand
        amid = [one for one in ([strand] if strand.inside else self._watched) if one.inside]
        seen = {one: one.by.eyes.observer for one in amid if one.by.eyes is not None}
        weights = _graded(optimizer) if len(seen) > 1 else frozenset()
        return next((one for one, observer in seen.items() if len(seen) == 1 or observer.reaches(weights)), None)

    def _others(self, strand: Strand) -> list[Strand]:
        return [other for other in self._watched if other is not strand] if len(self._watched) > 1 else []

    def _pass_on(self, strand: Strand, other: Strand, act: Callable[[Observer], None]) -> None:
        """Let the observer of one thread take something from that of another."""
        with self.alone(strand), strand.held() as one, other.held() as two:
            if other.eyes is not None and one and two:
                act(other.eyes.observer)
            else:
                self.missed("other-thread", f"what thread {strand.thread.name} had to do with a step of thread {other.thread.name}")

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """Do work of our own: its calls and backward passes go past every instrument, ours and the trainer's."""
        eyes = self.here.strand.eyes
        fresh = eyes is not None and "aside" not in eyes.mode.sleeping
        if eyes is not None:
            self._failsafe("suspend", eyes.mode.sleep, "aside")
        try:
            with unseen():
                yield
        finally:
            if eyes is not None and fresh:
                self._failsafe("resume", eyes.mode.wake, "aside")

    def finish(self, raised: str = "", error: BaseException | None = None) -> None:
        """The block was left: whoever is between two steps is asked what he has seen last. raised: class of what ended it. error: that."""
        for strand in self._watched:
            if strand.eyes is not None and self._is_idle(strand):
                self._failsafe("finish", strand.eyes.observer.finish, raised, False, error if strand.is_mine else None)
            else:
                self.missed("other-thread", f"the end of the step that thread {strand.thread.name} was in when the block was left")

    def forked(self) -> None:
        """In a forked process: only the thread that forked is there, and the step that runs is the parent's."""
        self._lock, self._passing = threading.Lock(), threading.RLock()
        self._watched = [strand for strand in self._watched if strand.is_mine]
        for strand in self._watched:
            strand.lock = threading.RLock()
            if strand.eyes is not None:
                self._failsafe("forget", strand.eyes.observer.forget)

    def forget(self) -> None:
        """Let go of all that is held. A thread that goes on may be writing to its tape right now, and is left with an empty one."""
        watched, self._watched, self.here = self._watched, [], Here()
        for strand in watched:
            if strand.eyes is not None and (strand.is_mine or not strand.thread.is_alive()):
                self._failsafe("forget", strand.eyes.forget)
            elif strand.eyes is not None:
                strand.eyes.mode.tape = Tape(0)

    def let_go(self) -> None:
        """Hold no tensor any more: somebody is about to ask whether he alone does."""
        for strand in list(self._watched):
            if strand.eyes is not None and self._is_idle(strand):
                with strand.lock:
                    strand.eyes.let_go()

    def _add(self, eyes: Instruments) -> None:
        strand = self.here.strand
        strand.eyes, self.here.modules = eyes, eyes.modules
        eyes.mode.tape.doubts.again = self._passed_over
        eyes.mode.tape.refused = self._refused
        with self._lock:
            self._watched.append(strand)
            self._share()

    def _passed_over(self) -> None:
        eyes = self.here.strand.eyes
        if eyes is not None and not self.resting:
            with self.aside():
                self._failsafe("passed-over", eyes.observer.passed_over)

    def _refused(self, args: tuple[object, ...], error: Exception) -> None:
        eyes = self.here.strand.eyes
        if eyes is not None and not self.resting:
            with self.aside():
                self._failsafe("refused", eyes.observer.refused, args, error)

    def _share(self) -> None:
        """Each may hold the same part of what may be held, on an account that no other thread reads or writes."""
        accounts = [strand.eyes.mode.tape.account for strand in self._watched if strand.eyes is not None]
        for account in accounts:
            account.budget = self._budget // len(accounts)

    def _retire(self) -> None:
        self.resting = True
        for strand in self._watched:
            if strand.eyes is not None:
                strand.eyes.mode.retire()

    def _is_idle(self, strand: Strand) -> bool:
        """Will nobody tell the observer of a thread anything any more?"""
        if strand.is_mine or not strand.thread.is_alive():
            return True
        if not strand.lock.acquire(timeout=PATIENCE):
            return False
        strand.lock.release()
        return not strand.inside and strand.stepping is None

    def _sweep(self) -> None:
        """Let go of threads that have ended, and that no other one will go on from."""
        with self._lock:
            over = [strand for strand in self._watched if not strand.thread.is_alive()]
            amid = [strand for strand in over if strand.eyes is not None and strand.eyes.observer.rests()]
            over = [strand for strand in over if strand not in amid[-LEFT_OFF:]]
            self._watched = [strand for strand in self._watched if strand not in over]
            self._share()
        for strand in over:
            if strand.eyes is not None:
                with contextlib.suppress(Deliberate):  # it was asked for in a thread that is no more
                    self._failsafe("finish", strand.eyes.observer.finish, "", True)
                self._failsafe("forget", strand.eyes.forget)


def _knows(strand: Strand, values: Iterable[Tensor]) -> bool:
    """Has a thread recorded one of these?"""
    return strand.eyes is not None and any(strand.eyes.mode.tape.find(value) is not None for value in values)


def _graded(optimizer: torch.optim.Optimizer) -> Set[int]:
    """The weights that an optimizer steps on gradients of, by id."""
    return {id(one) for group in optimizer.param_groups for one in group["params"] if one.grad is not None}
