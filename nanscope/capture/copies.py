"""Copies of a module, an optimizer or a context, to run somebody's code again without touching anything of the trainer's.

    copies = Copies(budget, lent)
    module, args = copies.of((call.module, call.args))

Everything that can be reached is copied: buffers, counters, caches, generators, what closures and bound methods hold. A parameter may be
lent: its copy is another tensor in the same memory, with no gradient, hook or version in common. Code (functions, classes) is shared.
Hooks that people have put on modules stay behind, but for those that belong to the module itself. What cannot be copied, a lock or a
process group, and what is too large, makes the whole copy fail: then nothing runs again.
"""

from __future__ import annotations

import builtins
import contextlib
import functools
import io
import pickle
import threading
import types
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Set
from copy import deepcopy
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from nanscope.capture.alone import NotIsolated
from nanscope.capture.foreign import is_foreign
from nanscope.capture.generators import is_generator, twin_of
from nanscope.errors import words_of
from nanscope.program.local import has_memory, is_wrapper
from nanscope.torch_inside import COMPILED, COMPILED_CALL, OPERATORS, OTHER_HOOKS, RUN_HOOKS, same_memory, uncompiled

Copied = TypeVar("Copied")

HEAP_TYPE = 1 << 9  # the flag of classes that are written in Python

WRAPPED = 4  # functions around functions that are looked through
INSTALLED = {"site-packages", "dist-packages"}  # folders of code that nobody here has written

LARGEST_STATE = 64 << 20  # bytes of everything beside tensors


def lent(parameter: nn.Parameter) -> nn.Parameter:
    """Return a parameter in the same memory: no gradient, hook or version of the original moves with it."""
    return same_memory(type(parameter), parameter.data, parameter.requires_grad)


def cloned(tensor: Tensor) -> Tensor:
    """Return a tensor with the same content and history as far as anybody who is given it can see."""
    twin = tensor.detach().clone()
    if isinstance(tensor, nn.Parameter):
        return same_memory(type(tensor), twin, tensor.requires_grad)
    if not tensor.requires_grad:
        return twin
    twin.requires_grad_()
    return twin if tensor.is_leaf else twin.view_as(twin)  # what has a history seems to have one


def mended(tensor: Tensor) -> Tensor:
    """Return the same with finite numbers, as its other elements are, in place of what is none."""
    twin = cloned(tensor)
    fine = torch.isfinite(twin)
    with torch.no_grad():
        twin[~fine] = twin[fine].median() if bool(fine.any()) else 1.0
    return twin


class Copies:
    """The copies of one run; each thing is copied once.

    budget: bytes of tensors that are copied. parameter: makes the copy of a parameter; one that shares its memory costs nothing. tensor:
    makes that of any other tensor. names: of objects beside modules these attributes alone are copied, None for all. dropped: hooks that
    were left behind. code: functions and classes that copy and original share.
    """

    def __init__(
        self,
        budget: int,
        parameter: Callable[[nn.Parameter], Tensor] = cloned,
        tensor: Callable[[Tensor], Tensor] = cloned,
        names: Set[str] | None = None,
    ) -> None:
        self.names = names
        self.dropped: list[str] = []
        self.bare = False  # parameters are copied without their attributes
        self.lean = False  # and modules without those which cannot be copied
        self.code: list[Any] = []
        self._budget, self._left = budget, budget
        self._parameter, self._tensor = parameter, tensor
        self._pairs: dict[int, tuple[Any, Any]] = {}  # id of an original → it and its stand-in
        self._own: list[Tensor] = []
        self._originals: dict[int, Tensor] = {}  # id of a copied tensor → the original

    def of(self, thing: Copied) -> Copied:
        """Return a copy. Raises NotIsolated if there is none.

        What an engine has hung on the weights, as what it gathers them by, stays behind where it cannot be copied. So does what a module
        holds of whoever trains it, a trainer with its iterators or a tokenizer; a forward that needs it will find that it is not there.
        """
        for self.bare, self.lean in ((False, False), (True, False), (True, True)):
            try:
                return self._made(thing)
            except NotIsolated:
                raise
            except Exception as error:  # noqa: BLE001 - whatever the objects of others do when they are copied
                why = error
        raise NotIsolated(f"it holds what cannot be copied ({words_of(why)})") from why

    def _made(self, thing: Copied) -> Copied:
        file = _Bounded()
        pickler = _Pickler(self, file)
        pickler.dump(thing)
        result: Copied = _Unpickler(pickler.shared, file).load()
        return result

    def takes(self, thing: object) -> bool:
        """Can it be copied by itself?"""
        self.lean = False
        try:
            self._made(thing)
        except NotIsolated:
            raise
        except Exception:  # noqa: BLE001 - as above
            return False
        finally:
            self.lean = True
        return True

    def stand_in(self, original: object, copy: object) -> None:
        """Take this for the copy of something."""
        self._pairs[id(original)] = (original, copy)

    def original(self, tensor: Tensor) -> Tensor:
        """Return what a tensor is the copy of; one that is no copy, itself."""
        return self._originals.get(id(tensor), tensor)

    def pairs(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Every tensor that was copied, with its copy."""
        return ((original, copy) for original, copy in self._pairs.values() if isinstance(copy, Tensor))

    def own(self) -> list[Tensor]:
        """The copies that share no memory with their originals: what runs may write to them."""
        return self._own

    def stand_in_of(self, thing: object) -> object | None:
        """Return what stands in for a tensor, a generator or what was given to `stand_in`; None for anything else."""
        if id(thing) not in self._pairs:
            if isinstance(thing, Tensor):
                return self._copy(thing)
            if not is_generator(thing):
                return None
            self.stand_in(thing, twin_of(thing))
        copy: object = self._pairs[id(thing)][1]
        return copy

    def _copy(self, tensor: Tensor) -> Tensor:
        if is_wrapper(type(tensor)) or tensor.is_nested:
            raise NotIsolated(f"it holds a {type(tensor).__name__}, which is more than the memory it lies in")
        if is_lazy(tensor):  # nothing is in it yet
            copy: Tensor = deepcopy(tensor)
            self.stand_in(tensor, copy)
            return copy
        if not (has_memory(tensor) or tensor.is_meta or tensor.layout is not torch.strided):  # to read it would end the process
            raise NotIsolated(f"it holds a {type(tensor).__name__} whose memory its owner has let go of")
        copy = self._parameter(tensor) if isinstance(tensor, nn.Parameter) else self._tensor(tensor)
        self._add(tensor, copy)
        return copy

    def _add(self, tensor: Tensor, copy: Tensor) -> None:
        if copy.layout is not torch.strided or copy.data_ptr() != tensor.data_ptr() or not copy.data_ptr():
            self._own.append(copy)
            self._left -= 0 if tensor.is_meta else tensor.numel() * tensor.element_size()
        if self._left < 0:
            raise NotIsolated(f"a copy of it would take more than {self._budget >> 20} MB")
        self.stand_in(tensor, copy)
        self._originals[id(copy)] = tensor

    def scripted(self, module: torch.jit.ScriptModule) -> torch.jit.ScriptModule:
        """Return a copy of what runs in torch's own interpreter, which only torch can copy: its parameters are not lent."""
        copy: torch.jit.ScriptModule = deepcopy(module)
        self.stand_in(module, copy)
        for mine, theirs in ((module.parameters(), copy.parameters()), (module.buffers(), copy.buffers())):
            for original, twin in zip(mine, theirs, strict=True):
                self._add(original, twin)
        return copy


class _Shared:
    """Stands for something that goes into the copy as it is."""

    def __init__(self, thing: object) -> None:
        self.thing = thing


_OF_MODULES = frozenset((*vars(nn.Module()), *RUN_HOOKS, *OTHER_HOOKS))  # attributes that each of them has
_CODE = (type, types.FunctionType, types.CodeType, functools._lru_cache_wrapper)
_ATOMS = (
    *_CODE, types.ModuleType, torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Stream, torch.Event,
    *OPERATORS, torch.fx.Graph,
)  # fmt: skip


class _Pickler(pickle.Pickler):
    """Takes things apart as pickle does, and leaves code, tensors and generators to `Copies`."""

    def __init__(self, copies: Copies, file: io.BytesIO) -> None:
        super().__init__(file, protocol=5)
        self.shared: list[object] = []
        self._copies = copies

    def persistent_id(self, thing: Any) -> int | None:
        if isinstance(thing, _Shared):
            return self._share(thing.thing)
        if isinstance(thing, _ATOMS) and not _has_state(thing):
            if isinstance(thing, _CODE):
                self._copies.code.append(thing)
            return self._share(thing)
        if isinstance(thing, Tensor) and vars(thing) and not (self._copies.bare and isinstance(thing, nn.Parameter)):
            return None
        copy = self._copies.stand_in_of(thing)
        return None if copy is None else self._share(copy)

    def _share(self, thing: object) -> int:
        self.shared.append(thing)
        return len(self.shared) - 1

    def reducer_override(self, thing: Any) -> Any:
        if isinstance(thing, Tensor):  # one with attributes
            return _itself, (_Shared(self._copies.stand_in_of(thing)),), vars(thing), None, None, _update
        if isinstance(thing, nn.Module):
            original = uncompiled(thing)
            if original is not None:
                return _itself, (original,)
            if isinstance(thing, torch.jit.ScriptModule):
                return _itself, (_Shared(self._copies.scripted(thing)),)
            return _bare, (type(thing),), self._state(thing), None, None, _update
        if isinstance(thing, types.FunctionType):
            if hasattr(thing, COMPILED):  # it runs as it is written: what is compiled holds the original
                return _itself, (getattr(thing, COMPILED),)
            self._copies.code.append(thing)
            state = (list(_contents(thing)), thing.__defaults__, thing.__kwdefaults__, vars(thing))
            return _function, (_Shared(thing), thing.__closure__ or ()), state, None, None, _fill
        if type(thing) in _REDUCED:
            return _REDUCED[type(thing)](thing)
        # An object is its attributes: what it wants to be in a file, or that it does not want to be in one, is not asked.
        if not _is_plain(thing):
            return NotImplemented
        names = self._copies.names
        own = {name: value for name, value in vars(thing).items() if names is None or name in names}
        return _bare, (type(thing),), own, None, None, _update

    def _state(self, module: nn.Module) -> dict[str, Any]:
        state = {name: value for name, value in vars(module).items() if name != COMPILED_CALL}
        for name in RUN_HOOKS:
            hooks = state.get(name) or {}
            state[name] = OrderedDict((key, hook) for key, hook in hooks.items() if belongs(hook, module))
            self._copies.dropped += [_name_of(hook) for hook in hooks.values() if not belongs(hook, module)]
        for name in OTHER_HOOKS:
            if name in state:
                state[name] = OrderedDict()
        if self._copies.lean:
            state = {name: value for name, value in state.items() if name in _OF_MODULES or self._copies.takes(value)}
        return state


class _Unpickler(pickle.Unpickler):
    def __init__(self, shared: list[object], file: io.BytesIO) -> None:
        file.seek(0)
        super().__init__(file)
        self._shared = shared

    def persistent_load(self, number: int) -> Any:
        return self._shared[number]


class _Bounded(io.BytesIO):
    """Memory that takes only so much."""

    def write(self, content: Any) -> int:
        if self.tell() > LARGEST_STATE:
            raise NotIsolated(f"it holds more than {LARGEST_STATE >> 20} MB beside its tensors")
        return super().write(content)


def belongs(hook: object, module: nn.Module) -> bool:
    """Is a hook a part of what its module computes, and not somebody's who watches? It is torch's own (weight norm), the library's that the
    module is of (a model that collects the outputs of its parts), a method of a module, or a function of nothing but its arguments."""
    hook = hook.func if isinstance(hook, functools.partial) else hook
    home = str(getattr(hook, "__module__", ""))
    if home.startswith("torch.") or _is_of_its_library(hook, home, module):
        return True
    if isinstance(hook, types.MethodType):
        return isinstance(hook.__self__, nn.Module)
    if not isinstance(hook, types.FunctionType) or _has_state(hook):
        return False
    code = hook.__code__
    inner = any(isinstance(constant, types.CodeType) for constant in code.co_consts)
    return not inner and not any(name in hook.__globals__ or name in vars(builtins) for name in code.co_names)


def _is_of_its_library(hook: object, home: str, module: nn.Module) -> bool:
    """Is a hook a function of the library that a module is of, as that is installed? home: the Python module that it is of."""
    return (
        isinstance(hook, types.FunctionType)
        and home.partition(".")[0] == type(module).__module__.partition(".")[0]
        and not INSTALLED.isdisjoint(Path(hook.__code__.co_filename).parts)
    )


def _name_of(hook: object) -> str:
    return str(getattr(hook, "__qualname__", type(hook).__qualname__))


def _is_plain(thing: object) -> bool:
    """Is something the attributes of a class in Python, with nothing beside them?"""
    kind = type(thing)
    if kind.__reduce_ex__ is not object.__reduce_ex__ or kind.__reduce__ is not object.__reduce__:
        return False
    slots = any(getattr(base, "__slots__", ()) for base in kind.__mro__)
    return not slots and all(base is object or base.__flags__ & HEAP_TYPE for base in kind.__mro__) and hasattr(thing, "__dict__")


def _has_state(thing: object, depth: int = 0) -> bool:
    """Does a function hold more than its code? One of torch's does if it wraps what belongs to a module."""
    if not isinstance(thing, types.FunctionType):
        return depth > 0 and isinstance(thing, (types.MethodType, nn.Module))
    if hasattr(thing, COMPILED):
        return True
    if not is_foreign(thing.__module__ or "") and (thing.__closure__ or thing.__defaults__ or thing.__kwdefaults__ or vars(thing)):
        return True
    return depth < WRAPPED and any(_has_state(content, depth + 1) for _, content in _contents(thing))


def _contents(function: types.FunctionType) -> Iterator[tuple[types.CellType, object]]:
    for cell in function.__closure__ or ():
        with contextlib.suppress(ValueError):  # an empty one
            yield cell, cell.cell_contents


def _reduced_weak(reference: weakref.ref[Any]) -> Any:
    target = reference()
    return (_nobody, ()) if target is None else (weakref.ref, (target,))


_REDUCED: Mapping[type, Callable[[Any], Any]] = {
    type(threading.Lock()): lambda lock: (threading.Lock, ()),
    type(threading.RLock()): lambda lock: (threading.RLock, ()),
    types.CellType: lambda cell: (types.CellType, ()),  # filled with its function: it may hold that itself
    types.MethodType: lambda method: (types.MethodType, (method.__func__, method.__self__)),
    weakref.ref: _reduced_weak,
}


# How things are put together again.


def _itself(thing: object) -> object:
    return thing


def _bare(kind: type) -> object:
    return object.__new__(kind)


def _update(thing: Any, state: dict[str, Any]) -> None:
    thing.__dict__.update(state)


def _function(original: types.FunctionType, cells: tuple[types.CellType, ...]) -> types.FunctionType:
    return types.FunctionType(original.__code__, original.__globals__, original.__name__, None, cells or None)


def _fill(function: Any, state: tuple[Any, ...]) -> None:
    contents, function.__defaults__, function.__kwdefaults__, attributes = state
    for cell, content in contents:
        cell.cell_contents = content
    function.__dict__.update(attributes)


class _Nobody:
    pass


def _nobody() -> weakref.ref[Any]:
    return weakref.ref(_Nobody())
