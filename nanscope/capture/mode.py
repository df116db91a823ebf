"""The mode through which the tape listens: on the stack of a thread while its calls are to be written down, off it while they are not."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from nanscope.capture.counting import to_let_in
from nanscope.capture.depth import Depth
from nanscope.capture.entries import Operator
from nanscope.capture.failsafe import Failsafe
from nanscope.capture.tape import Tape
from nanscope.capture.unseen import is_faked, unseen
from nanscope.errors import Deliberate
from nanscope.torch_inside import (
    COMPILED_CODE_SEES_MODES,
    Mode,
    TorchDispatchMode,
    around_compiled_code,
    count_function_modes,
    count_modes,
    modes,
    pop_mode,
    push_mode,
    running_backward,
    set_excluded,
    top_mode,
)

Answer = TypeVar("Answer")
NO_KEYWORDS: dict[str, Any] = {}  # of a call that was given none: one for all, since what waits is held, and the collector counts
OVER = "over"  # why a mode sleeps that nobody will wake


class TapeMode(Mode):
    """Feeds a tape. Compiled regions are left alone: they stay compiled, and their results are leaves.

    sleeping: who asked for silence. failsafe: is told of a failure; without one the failure is raised. depth: listens in place of the tape
    while a model is called, None where nothing does. within: a backward pass of autograd whose calls it listens to, -1 for none.
    """

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __init__(self, tape: Tape, failsafe: Failsafe | None = None, within: int = -1) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.tape, self._within = tape, within
        self.depth: Depth | None = None
        self.sleeping: set[str] = set()
        self._thread = threading.get_ident()
        self._failsafe = failsafe
        self._below: int | None = None  # modes that were under us when we stepped aside, None while we are on the stack

    def sleep(self, why: str) -> None:
        """Step aside: off the stack where we are on top of it, else passing calls through. Lasts until each who asked for it lets go."""
        if self._below is None and top_mode() is self:
            pop_mode()
            self._below = count_modes()
        self.sleeping.add(why)

    def wake(self, why: str) -> None:
        """Undo `sleep`; who did not ask for it changes nothing."""
        self.sleeping.discard(why)
        if not self.sleeping and self._below is not None:
            # A mode that was entered meanwhile, and is not left yet, will take down what is on top.
            above = _taken_off(self._below)
            push_mode(self)
            _put_back(above)
            self._below = None

    def install(self, undo: contextlib.ExitStack) -> None:
        """Begin to listen. undo: takes us off the stack, wherever on it we are by then; that of another thread only passes us by."""

        def leave() -> None:  # calls nothing of ours, which might fail
            above: list[TorchDispatchMode] = []
            if self in modes():
                while top_mode() is not self:
                    above.append(pop_mode())
            else:
                push_mode(self)
            self.sleeping.add(OVER)
            self.__exit__(None, None, None)  # type: ignore[no-untyped-call]
            for mode in reversed(above):
                push_mode(mode)

        _put_back([mode for mode in _taken_off(0) if not _is_over(mode)])
        self.__enter__()  # type: ignore[no-untyped-call]
        undo.callback(leave)
        if COMPILED_CODE_SEES_MODES:
            undo.callback(around_compiled_code(partial(self._while_compiled, self.sleep), partial(self._while_compiled, self.wake)))

    def _while_compiled(self, act: Callable[[str], None]) -> None:
        if threading.get_ident() == self._thread:
            act("compiled")

    def slip_under(self) -> None:
        """Begin to listen in a thread that is on its way: below the modes of the trainer's that are on its stack, and leaves them so."""
        above = _taken_off(0)
        push_mode(self)
        _put_back([mode for mode in above if not _is_over(mode)])

    def retire(self) -> None:
        """Listen no more. Takes us off the stack of this thread; where we are on that of another one, we pass calls on for good."""
        self.sleeping.add(OVER)
        stack = modes()
        if self in stack:
            above = _taken_off(stack.index(self) + 1)
            pop_mode()
            _put_back(above)

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs, ear = kwargs or NO_KEYWORDS, self.depth or self.tape
        crowded = count_modes() > 0 or count_function_modes() > 0  # somebody else looks, too
        operator = ear.operators.get(id(func)) or self._door(crowded, ear.look_up, func)
        if operator is None or operator.silent:
            return func(*args, **kwargs)
        if (operator.waits or operator.may_wait) and not (
            crowded or self.sleeping or ear.broken or self.depth is not None or running_backward() != -1
        ):
            destroyed = () if operator.waits else self._door(False, self.tape.may_write, operator, args, kwargs)
            if destroyed is not None:
                try:  # what a call raises is the trainer's own
                    result = self._called(operator, func, args, kwargs) if operator.lets_in else func(*args, **kwargs)
                except Exception as error:
                    self._door(False, self.tape.refused, args, error)
                    raise
                try:
                    self.tape.note(operator, args, kwargs, result, destroyed[0] if destroyed else None)
                except Exception as error:  # noqa: BLE001 - of ours; as `_door`, in the place where most calls come by
                    self._failed(error)
                return result
        noting, task = None, -1
        if not (self.sleeping or ear.broken or (crowded and is_faked())):  # tensors without content
            task = running_backward()  # one that we did not see begin
            if task in (-1, self._within):
                noting = self._door(crowded, ear.before, operator, args, kwargs)
        try:
            result = self._called(operator, func, args, kwargs) if operator.lets_in else func(*args, **kwargs)
        except Exception as error:
            if task in (-1, self._within) and self.depth is None and not self.sleeping:
                self._door(crowded, self.tape.refused, args, error)
            raise
        if noting is not None:
            self._door(crowded, ear.after, noting, args, result)
        elif task != -1 and self.depth is None:
            self._door(crowded, self.tape.inside, task, result)
        return result

    def _called(self, operator: Operator, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Make a call that leaves to those which it is made of what it would without us."""
        keys = self._door(False, to_let_in, operator.inside)
        if not keys:
            return func(*args, **kwargs)
        with contextlib.ExitStack() as inside:
            for key in keys:
                inside.enter_context(set_excluded(key, False))
            return func(*args, **kwargs)

    def _door(self, crowded: bool, function: Callable[..., Answer], *args: Any) -> Answer | None:
        """Call the tape. Once it has failed nothing more is recorded until its next `forget`."""
        try:
            if not crowded:
                return function(*args)
            with unseen():
                return function(*args)
        except Exception as error:  # noqa: BLE001 - of ours
            self._failed(error)
            return None

    def _failed(self, error: Exception) -> None:
        """Go on without the tape, where somebody is there to be told."""
        if isinstance(error, Deliberate):
            raise error
        if OVER in self.sleeping:  # what is told to the tape of a thread that goes on is nobody's business any more
            return
        (self.depth or self.tape).broken = type(error).__name__
        if self._failsafe is None:
            raise error
        self._failsafe.caught("tape", error)


def _is_over(mode: TorchDispatchMode) -> bool:
    return isinstance(mode, TapeMode) and OVER in mode.sleeping


def _taken_off(below: int) -> list[TorchDispatchMode]:
    """Take modes off the stack until so many are left, and return them, the uppermost first."""
    return [pop_mode() for _ in range(count_modes() - below)]


def _put_back(modes: list[TorchDispatchMode]) -> None:
    for mode in reversed(modes):
        push_mode(mode)
