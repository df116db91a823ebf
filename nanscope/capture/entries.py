"""What the tape notes, as plain data: operators, calls and values, and how a tensor is told from others in the same memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from types import CodeType
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction

from nanscope.capture.counting import casts_inside, left_inside
from nanscope.capture.modules import Address, version_of
from nanscope.program.calls import Arg, Leaf, Ref, runs_again
from nanscope.program.ops import (
    ASKS_BY_ITSELF,
    ASKS_EACH,
    ATTENTIONS,
    DATA_FACTORIES,
    FLOW,
    GRADIENT_NORMS,
    HISTORY_ENDS,
    OVERWRITES,
    SHARED,
    SILENT,
)
from nanscope.torch_inside import (
    base_of,
    drop_storage_handle,
    overload_name,
    schema_of,
    storage_gone,
    storage_handle,
    weak_tensor,
    writes_counted,
)

Made = TypeVar("Made")

Noted = tuple[tuple[Arg, ...], tuple[tuple[str, Arg], ...]]  # arguments and keyword arguments, tensors by reference
Key = tuple[int, tuple[int, ...], tuple[int, ...], torch.dtype, int]  # address, shape, stride, dtype, history
AT_ONCE = SILENT | {"as_strided"}  # what more is asked of than a value
ANSWER = "_local_scalar_dense"  # the call by which an element goes to the host
PLAIN = 0  # the history of a value that no gradient flows through; any other is the identity of a tensor, see `history_of`


class Unseen(LookupError):
    """The tape met something that it cannot note; the value becomes an opaque leaf."""


@dataclass(slots=True)
class Value:
    """What the tape knows of one value. tensor is None where it was too large to keep."""

    id: int
    key: Key
    tensor: Tensor | None
    bytes: int
    version: int | None  # None until first read: a view shares its base's count only after the call that made it
    storage: int
    diff: bool
    shape: tuple[int, ...]
    dtype: torch.dtype
    leaf: Leaf | None = None
    copied: bool = False  # the tensor is a copy of ours, of what a write has destroyed
    alien: int = PLAIN  # history that this one's views seem to have: it is a view, and a gradient does not go through its base
    place: tuple[CodeType | None, int] = (None, -1)  # where its memory was made, if nobody was seen to write to it
    guard: Any = None  # weak handle that keeps the address of a tensor which is not kept from being reused

    @property
    def history(self) -> int:
        """What a gradient goes through, PLAIN if there is none."""
        return self.key[4]


@dataclass(frozen=True, slots=True)
class Taken:
    """An argument of a kernel. tensor: None where the budget had no room for it."""

    tensor: Tensor | None
    version: int
    address: Address

    def content(self) -> Tensor | None:
        """Return the tensor if nobody is known to have written to it."""
        return self.tensor if self.tensor is not None and version_of(self.tensor) == self.version else None


@dataclass(frozen=True, slots=True)
class Handed:
    """An argument of a call. value: its number; content, writes: as it was, and how often it had been written to. computed: by calls. of:
    that by which ranks had handed it to each other before."""

    value: int
    content: Tensor
    writes: int
    computed: bool
    of: Opaque | None


@dataclass(frozen=True, slots=True)
class Opaque:
    """A call that cannot be made again. read: ids of its arguments, where they are known. place: where in the trainer's code. exchange:
    with it ranks have handed numbers to each other. held: what it was given, if that is small."""

    op: str
    read: tuple[int, ...]
    place: tuple[CodeType | None, int]
    exchange: bool = False
    held: tuple[Handed, ...] = ()


@dataclass(frozen=True, slots=True)
class Operator:
    """What the tape needs to know of an aten overload, looked up once."""

    function: Any  # the overload itself
    name: str
    overload: str
    mutable: bool
    view: bool  # its result is a view to autograd, too
    functional: str | None  # the overload without the write, for in-place operators
    turns: bool  # in place, but what it changes is how a tensor lies or whether it has a gradient, not its elements
    replayable: bool  # in this process
    listed: bool  # and from a file
    ends: bool  # no gradient flows through it
    inside: tuple[Any, ...]  # keys of what it leaves to the calls that it is made of
    lets_in: bool  # or these may be cast
    waits: bool  # to note it is enough until somebody asks
    counts: bool  # if what it makes are whole numbers, an index or a choice
    draws: bool  # another one each time: nothing of it is made again
    may_wait: bool  # so it is if nobody but calls that wait knows what it writes to, or nobody but a model that nobody trains
    gives: bool  # what it makes it writes to `out`, and to nothing else
    lasting: bool  # what it is given lasts for a step anyway: gradients, weights and what an optimizer has of them
    silent: bool  # no value comes of it, nor any answer about one
    norm: bool  # what a clip divides gradients by may be one
    asks: bool  # of each element whether it is finite, or replaces those that are not

    @property
    def forms(self) -> tuple[str | None, str]:
        """As what a call of it may stand in a program."""
        return self.functional, self.overload

    @staticmethod
    def of(func: Any) -> Operator:
        """Look an overload up. Those of torch stay as they are; an extension may go on registering kernels."""
        return _of_torch(func) if func.namespace == "aten" else Operator._of(func)

    @staticmethod
    def _of(func: Any) -> Operator:
        schema = schema_of(func)
        name = schema.name.removeprefix("aten::")
        pure, inside, casts = _functional(func, name), left_inside(func), casts_inside(func)
        lists = name.startswith("_foreach_")
        seeded = func.namespace == "aten" and torch.Tag.nondeterministic_seeded in func.tags
        draws = seeded and name not in DATA_FACTORIES | ATTENTIONS  # attention draws where it drops some out, see `drops_out`
        counts = name not in FLOW and not schema.is_mutable and (draws or runs_again(func))
        waits = not schema.is_mutable if name in FLOW else counts or (lists and (_writes_to_lists(schema) or not schema.is_mutable))
        gives = _gives(schema) and name in FLOW and not (inside or casts)
        of_one = schema.is_mutable and name.endswith("_") and not (inside or casts)
        writes_one = of_one and (name.rstrip("_") in FLOW or name.rstrip("_") in OVERWRITES)
        return Operator(
            func,
            name,
            str(func),
            schema.is_mutable,
            _is_view(schema),
            None if pure is None else str(pure),
            pure is not None and _is_view(schema_of(pure)),
            name in FLOW or runs_again(func),
            name in FLOW,
            name in HISTORY_ENDS,
            inside,
            casts or bool(inside),
            waits and name not in AT_ONCE,
            counts,
            draws,
            gives or (writes_one and name.rstrip("_") not in SHARED),
            gives,
            lists,
            (name in SILENT and name != ANSWER) or "Tensor" not in str(schema),
            name in GRADIENT_NORMS,
            name.rstrip("_") in ASKS_EACH or name in ASKS_BY_ITSELF,
        )


@lru_cache(maxsize=1024)  # each thread and each run has a tape of its own
def _of_torch(func: Any) -> Operator:
    return Operator._of(func)


def _functional(func: Any, name: str) -> Any | None:
    """aten.mul_.Tensor → aten.mul.Tensor, aten.transpose_.default → aten.transpose.int: what takes the same and writes nothing."""
    packet = getattr(torch.ops.aten, name.rstrip("_"), None)
    if packet is None:
        return None
    own, ours = overload_name(func), _arguments(func)
    for overload in sorted(packet.overloads(), key=lambda other: other != own):
        found = getattr(packet, overload)
        if not schema_of(found).is_mutable and _arguments(found) == ours:
            return found
    return None


def _arguments(func: Any) -> list[tuple[str, str]]:
    return [(one.name, str(one.type)) for one in schema_of(func).arguments]


def _writes_to_lists(schema: Any) -> bool:
    """Is what it writes to one list of tensors? Nobody notes in functional form what such a call has made of them."""
    written = [one for one in schema.arguments if one.alias_info is not None and one.alias_info.is_write]
    return (
        not schema.returns and len(written) == 1 and written[0].name == schema.arguments[0].name and str(written[0].type) == "List[Tensor]"
    )


def _gives(schema: Any) -> bool:
    """Is what it writes to one tensor, by name, and what it returns?"""
    written = [one.name for one in schema.arguments if one.alias_info is not None and one.alias_info.is_write]
    return written == ["out"] and len(schema.returns) == 1


def _is_view(schema: Any) -> bool:
    return any(one.alias_info is not None for one in schema.returns)


@dataclass(slots=True)  # frozen ones are slower to make, and this is made at every call
class Record:
    """One recorded call, with its code position still unresolved."""

    op: str
    args: tuple[Arg, ...]
    kwargs: tuple[tuple[str, Arg], ...]
    outs: tuple[int | None, ...]
    grad: bool
    code: CodeType | None
    lasti: int
    module: str = ""
    _reads: tuple[int, ...] | None = field(default=None, init=False)

    def reads(self) -> tuple[int, ...]:
        """Return the ids of the values that the call reads."""
        if self._reads is None:
            found = [arg.id for arg in self.args if isinstance(arg, Ref)]
            found += [value for arg in self.args if isinstance(arg, tuple) for value in ids(arg)]
            found += [value for _, arg in self.kwargs for value in ids(arg)]
            self._reads = tuple(found)
        return self._reads


class Handle:
    """A weak handle on a tensor that is not kept: its memory and its identity are not taken for those of what follows it there."""

    __slots__ = ("_is_history", "_of", "_storage", "_tensor")

    def __init__(self, tensor: Tensor) -> None:
        self._storage = storage_handle(tensor.untyped_storage())
        self._of, self._tensor = id(tensor), weak_tensor(tensor)
        self._is_history = tensor.requires_grad and base_of(tensor) is None

    def expired(self) -> bool:
        """Is its memory gone, or the history whose identity it was?"""
        return bool(storage_gone(self._storage)) or (self._is_history and self._tensor.expired())

    def is_of(self, tensor: Tensor) -> bool:
        """Is it this tensor that it is a handle on?"""
        return self._of == id(tensor) and not self.gone()

    def gone(self) -> bool:
        """Is the tensor itself gone?"""
        return bool(self._tensor.expired())

    def __del__(self) -> None:
        storage = getattr(self, "_storage", None)  # which a sparse tensor has none of
        if storage is not None and drop_storage_handle is not None:  # None while the interpreter shuts down
            drop_storage_handle(storage)


def still_there(known: Mapping[Address, tuple[Made, Handle]]) -> dict[Address, tuple[Made, Handle]]:
    """Return what is known by where it lay, but for what is gone."""
    return {place: made for place, made in known.items() if not made[1].expired()}


def history_of(tensor: Tensor) -> int:
    """Return what tells tensors of the same memory apart by the way that a gradient takes: the identity of the tensor that they are views
    of, PLAIN if there is no gradient."""
    if not tensor.requires_grad:
        return PLAIN
    base = base_of(tensor)
    if base is None:
        return id(tensor)
    try:
        node: object = tensor.grad_fn
        if node is None and base.requires_grad:
            return PLAIN  # a view that was made under no_grad leads nowhere, whatever it says
        # one that a custom function returns leads where the function wants
        return id(tensor if node is None or isinstance(node, BackwardCFunction) else base)
    except RuntimeError:  # a view made without gradient, of a tensor that was written to since: autograd itself will not have it
        return PLAIN


def node_of(tensor: Tensor) -> object | None:
    """Return the autograd node that made a tensor."""
    try:
        return tensor.grad_fn
    except RuntimeError:  # as above
        return None


def next_version(tensor: Tensor) -> int:
    """The count that a tensor will have when the write which is being seen has been counted."""
    return 0 if tensor.is_inference() else writes_counted(tensor) + 1


def is_intact(value: Value) -> bool:
    """Does a held tensor still hold what was read from it?"""
    if value.tensor is None:
        return False
    if value.copied:
        return True
    here = value.tensor.data_ptr() == value.key[0] and value.tensor.shape == value.shape
    return here and value.version in (None, version_of(value.tensor))


def ids(arg: Arg) -> Iterator[int]:
    if isinstance(arg, Ref):
        yield arg.id
    elif isinstance(arg, tuple):
        for item in arg:
            yield from ids(item)


NUMBERS = frozenset({int, float, bool, type(None)})  # what else most arguments are


def tensors_of(tree: Any) -> list[Tensor]:
    """Return the tensors in an argument, or in all of them, in order."""
    if isinstance(tree, Tensor):
        return [tree]
    found: list[Tensor] = []
    if isinstance(tree, (list, tuple)):
        for item in tree:
            kind = type(item)
            if kind is Tensor or (kind not in NUMBERS and isinstance(item, Tensor)):
                found.append(item)
            elif kind is tuple or kind is list or isinstance(item, (list, tuple)):
                found += tensors_of(item)
    return found
