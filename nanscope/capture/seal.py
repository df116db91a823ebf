"""Somebody's code runs once more, sealed: what it draws, counts and writes outside of the copies it is given does not come out.

A write to memory that was there before is refused before it is made, and so is a collective, which would wait for ranks that do not look.
Generators, hooks of others and compilers are as they were when the run is over, however it ends.
"""

from __future__ import annotations

import contextlib
import functools
import random
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from nanscope.capture.alone import NotIsolated, refuse_collective
from nanscope.capture.modules import tensors_in
from nanscope.capture.reach import Reach
from nanscope.program.local import memory_of
from nanscope.program.ops import OVERWRITES, UNWRITTEN_FACTORIES, base_name
from nanscope.torch_inside import (
    Mode,
    backward_hooks,
    backward_pre_hooks,
    forward_hooks,
    has_schema,
    is_compiler_loaded,
    pre_hooks,
    schema_of,
)

# What these write to the schema does not tell: the running mean and the running variance, where argument 5 says that they train.
STATISTICS = frozenset({"aten::native_batch_norm", "aten::cudnn_batch_norm", "aten::miopen_batch_norm"})

FRESH = torch.ops.aten.lift_fresh.default  # hands over what `torch.tensor` has just made, where nobody sees it


MARK = 0xFF  # in every byte a float of any size is NaN


def is_marked(tensor: Tensor) -> Tensor:
    """Return which elements hold what memory without content was filled with."""
    return (tensor.reshape(-1).view(torch.uint8).reshape(*tensor.shape, tensor.dtype.itemsize) == MARK).all(-1)


class Written(NotIsolated):
    """The code writes to a tensor that is not its own."""

    def __init__(self, tensor: Tensor, op: str) -> None:
        super().__init__(f"it writes to memory that it did not make ({op})")
        self.storage = memory_of(tensor)


class Seal(Mode):
    """Lets calls read anything, and write only to what was made in here or is named.

    own: copies that may be written to. marks: memory that is made without content holds MARK in every byte, see `is_marked`.
    """

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __init__(self, own: Iterable[Tensor] = (), marks: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.written: set[int] = set()  # storages
        self._marks = marks
        self._own = {memory_of(tensor) for tensor in own}
        self._drawn: dict[int, tuple[torch.Generator, Tensor]] = {}  # generators of others, as they were

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        refuse_collective(func)
        targets = writes_of(func, args, kwargs)[0]
        for tensor in targets:
            place = memory_of(tensor)
            if place and place not in self._own:
                raise Written(tensor, str(func))
            self.written.add(place)
        for value in (*args, *kwargs.values()):
            if isinstance(value, torch.Generator):
                self._drawn.setdefault(id(value), (value, value.get_state()))
        before = set() if func is FRESH else {memory_of(tensor) for tensor in tensors_in([args, kwargs])}
        result = func(*args, **kwargs)
        if self._marks and base_name(str(func)).startswith(tuple(UNWRITTEN_FACTORIES)):
            for tensor in tensors_in([result]):
                tensor.untyped_storage().fill_(MARK)  # type: ignore[attr-defined]
        self._own |= {memory_of(tensor) for tensor in (*tensors_in([result]), *targets)} - before  # a view's memory is not new
        return result

    def put_back(self) -> None:
        """Set the generators that were drawn from to where they were."""
        for generator, state in self._drawn.values():
            generator.set_state(state)


@contextlib.contextmanager
def sealed(seal: Seal, code: Iterable[object] = ()) -> Iterator[None]:
    """Let somebody's code run in here. code: functions and classes that may run."""
    with contextlib.ExitStack() as stack:
        reach = Reach(code)
        stack.callback(reach.put_back)
        reach.lend()
        stack.enter_context(generators_kept())
        stack.callback(seal.put_back)
        stack.enter_context(_hooks_asleep())
        if is_compiler_loaded():  # what is compiled runs as it is written: nothing is compiled anew, and calls are seen
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.enter_context(seal)
        try:
            yield
        except SystemExit as error:
            raise RuntimeError("it would end the process") from error


@contextlib.contextmanager
def generators_kept() -> Iterator[None]:
    """What is drawn in here was never drawn: from torch's, Python's and numpy's global generators."""
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_available() and torch.cuda.is_initialized() else []  # type: ignore[no-untyped-call]
    numpy = sys.modules.get("numpy")
    python, array = random.getstate(), numpy.random.get_state() if numpy is not None else None
    with torch.random.fork_rng(devices=devices):
        try:
            yield
        finally:
            random.setstate(python)
            if numpy is not None:
                numpy.random.set_state(array)


@contextlib.contextmanager
def _hooks_asleep() -> Iterator[None]:
    """Global module hooks, ours and those of others, do not fire in this thread."""
    thread = threading.get_ident()
    kept = [(table, dict(table)) for table in (pre_hooks, forward_hooks, backward_pre_hooks, backward_hooks)]
    for table, content in kept:
        table.update({key: functools.partial(_elsewhere, thread, hook) for key, hook in content.items()})
    try:
        yield
    finally:
        for table, content in kept:
            table.update({key: hook for key, hook in content.items() if key in table})


def _elsewhere(thread: int, hook: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return None if threading.get_ident() == thread else hook(*args, **kwargs)


def writes_of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Tensor], set[int]]:
    """Return the arguments that a call writes to, and which of them it does not read before (by id)."""
    schema = schema_of(func) if has_schema(func) else None
    if schema is not None and schema.name in STATISTICS and len(args) > 5 and args[5]:
        return list(tensors_in(args[3:5])), set()
    if schema is None or not schema.is_mutable:
        return [], set()
    found: list[Tensor] = []
    untouched: set[int] = set()
    for position, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            own = list(tensors_in([args[position] if position < len(args) else kwargs.get(argument.name)]))
            found += own
            if argument.is_out or schema.name.removeprefix("aten::").rstrip("_") in OVERWRITES:
                untouched |= {id(tensor) for tensor in own}
    return found, untouched
