"""The tape: sees every aten call outside `nn.Module.forward` and writes it down as a program.

Below autograd a call is seen with real tensors, so nothing about the run changes: the call is made, then noted. What is kept of it is
the operator, references to its arguments, a reference to its result (up to a byte budget; autograd holds most of them anyway) and the
code position. Which variable a result was bound to is worked out from the source only when somebody asks.

Values are told apart by memory: address, shape, stride, dtype, and the history that a gradient takes (`x`, `x.detach()` and
`x.detach().requires_grad_()` share the rest). In-place writes are noted in their functional form, so the recorded program is pure; what
has no faithful one, and a write that the tape did not see, which the tensor's version tells, makes a new leaf of what was changed.
"""

from __future__ import annotations

import logging
import math
import re
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
from torch import Tensor
from torch._C import _WeakTensorRef  # type: ignore[attr-defined]
from torch.autograd.function import BackwardCFunction
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode, _pop_mode, _push_mode

from nanscope.capture.modules import Address, address
from nanscope.capture.source import is_open, site_of
from nanscope.frameworks.live import Glimpse, glimpse
from nanscope.frameworks.rows import LossSite
from nanscope.frameworks.table import site_in
from nanscope.program.calls import Arg, Call, Leaf, Ref, Site
from nanscope.program.ops import FLOW, Flow
from nanscope.program.program import Program

log = logging.getLogger("nanscope")

BUDGET = 256 << 20  # bytes of results and leaves held by reference
RING = 4096  # calls without gradient that are remembered (generation makes millions of them)
REMEMBERED = 1 << 20  # bytes; results up to this size outlive a backward pass, so advantages stay explained in every micro-batch

_TORCH = str(Path(torch.__file__).parent)
_OURS = str(Path(__file__).parents[1])
_SCALE = torch.amp.GradScaler.scale.__code__
_DETACHING = frozenset(("detach", "detach_", *(name for name, flow in FLOW.items() if flow is Flow.CREATE and name != "fill")))
_DATA = frozenset(("rand", "randn", "randint", "randperm", "empty", "empty_like", "empty_strided", "new_empty", "uniform_", "normal_"))
_NUMBER = re.compile(r"-?[0-9.]+(e-?[0-9]+)?")
_EMPTY = ("empty", "new_empty")  # memory that somebody has still to write
_NORMS = frozenset(("_foreach_norm", "linalg_vector_norm", "norm"))
_QUIET = frozenset(("_local_scalar_dense", "is_nonzero", "_assert_async", "is_same_size", "set_", "resize_", "record_stream"))

Step = tuple[str, tuple[Arg, ...], tuple[tuple[str, Arg], ...]]  # operator, arguments after the first, keyword arguments
Noted = tuple[tuple[Arg, ...], tuple[tuple[str, Arg], ...]]  # arguments and keyword arguments, tensors by reference
Key = tuple[int, tuple[int, ...], tuple[int, ...], torch.dtype, int]  # address, shape, stride, dtype, history
PLAIN = 0  # the history of a value that no gradient flows through; any other is the identity of a tensor, see `_history`


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
    position: tuple[int, int] | None = None  # (call index, argument) that first read a leaf: the source there names it
    copied: bool = False  # the tensor is a copy of ours, of what a write has destroyed
    alien: int = PLAIN  # history that this one's views seem to have: it is a view, and a gradient does not go through its base
    guard: Any = None  # weak handle that keeps the address of a tensor which is not kept from being reused

    @property
    def history(self) -> int:
        """What a gradient goes through, PLAIN if there is none."""
        return self.key[4]


@dataclass(frozen=True, slots=True)
class Taken:
    """An argument of a kernel. tensor: None where the budget had no room for it. bytes: on the account of the budget."""

    tensor: Tensor | None
    version: int
    bytes: int
    address: Address

    def content(self) -> Tensor | None:
        """Return the tensor if nobody is known to have written to it."""
        return self.tensor if self.tensor is not None and _version(self.tensor) == self.version else None


@dataclass(frozen=True, slots=True)
class Operator:
    """What the tape needs to know of an aten overload, looked up once."""

    name: str
    overload: str
    mutable: bool
    view: bool  # its result is a view to autograd, too
    functional: str | None  # the overload without the write, for in-place operators
    turns: bool  # in place, but what it changes is how a tensor lies or whether it has a gradient, not its elements
    replayable: bool


@dataclass(slots=True)
class Entry:
    """One recorded call, with its code position still unresolved."""

    op: str
    args: tuple[Arg, ...]
    kwargs: tuple[tuple[str, Arg], ...]
    outs: tuple[int | None, ...]
    grad: bool
    code: CodeType | None
    lasti: int
    module: str = ""


class Unseen(Exception):
    """The tape met something that it cannot note; the value becomes an opaque leaf."""


class Tape:
    """What was recorded since the last `forget`.

    budget: bytes of tensors that may be held by reference. `held` says how many are. A single one may take an eighth of it; a larger one
    cuts the program. wide: bytes of a single one of three dimensions and more, by default the same.
    """

    def __init__(self, budget: int = BUDGET, wide: int | None = None) -> None:
        self.budget = budget
        self.largest = budget // 8
        self.wide = self.largest if wide is None else wide
        self.entries: dict[int, Entry] = {}  # by number, in order
        self.count = 0  # calls numbered so far
        self._passing: list[int] = []  # calls that a finished backward pass takes with it
        self._lasting: deque[int] = deque()  # calls without gradient on small tensors: kept until pushed out by newer ones
        self._owned: dict[int, list[int]] = {}  # call → leaves that it was the first to read
        self.values: dict[int, Value] = {}
        self.by_key: dict[Key, int] = {}
        self.by_storage: dict[int, list[int]] = {}
        self.made_by: dict[int, int] = {}
        self.held = 0
        self._written: tuple[int, int | None] = (PLAIN, None)  # history and version after the last write in place
        self._owners: dict[int, int] = {}  # history that views seem to have → the one that they have, by whoever was seen first
        self._mixed: set[int] = set()  # seeming histories of several owners: there only the tensor itself tells
        self._storages: dict[int, list[int]] = {}  # address → values that hold it, bytes
        self.broken = ""
        self.opaque: dict[Address, str] = {}  # results of calls that cannot be replayed, until they are read
        self.tags: dict[str, int] = {}
        self._replay_cache: tuple[int, dict[int, bool]] = (-1, {})
        self.norms: list[Tensor] = []  # norms taken without gradient since the last `forget`: of gradients, by whoever clips them
        self._norm_place: tuple[CodeType | None, int] = (None, -1)
        self.scaled = False  # a GradScaler multiplied something since the last `forget`
        self._next = 0
        self._read: list[int] = []  # ids of the arguments of the call that is being noted
        self._users: dict[CodeType, bool] = {}
        self._sites: dict[CodeType, LossSite] = {}  # functions in which a framework computes its loss
        self.glimpses: dict[CodeType, Glimpse] = {}  # what was seen of them since the last `forget`
        self.taken: dict[str, Taken] = {}  # by argument of a kernel
        self._known: dict[Any, Operator] = {}
        self.current_module = ""  # set by a second look while it runs inside a module
        self.module_outputs: Callable[[Tensor], str | None] = lambda tensor: None
        self.is_parameter: Callable[[Tensor], str | None] = lambda tensor: None

    # -- recording -------------------------------------------------------------------------------------------------------

    def note(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], call: Callable[[], Any]) -> Any:
        """Make the call, write it down, and return its result. Never raises on its own account."""
        if self.broken:
            return call()
        known = self._known.get(func)
        if known is None:
            if not hasattr(func, "_schema"):  # a higher-order operator
                return call()
            known = self._know(func)
        name, mutable = known.name, known.mutable
        if name in _QUIET:
            return call()
        noted: Noted | None = None
        target: Value | None = None
        try:
            arg = self._arg
            self._read.clear()
            noted = (tuple([arg(a) for a in args]), tuple([(k, arg(v)) for k, v in kwargs.items()]) if kwargs else ())
            if mutable:
                target = self._before_write(args[0] if args else None, known.turns)
        except Unseen:
            noted = None
        except Exception as error:  # noqa: BLE001 - whatever fails in here must not reach the training run
            self._break(error)
            return call()
        result = call()
        try:
            if noted is None:
                self._forget_results(result)
            elif mutable:
                self._after_write(known, noted, target, args, result)
            else:
                self._after_call(known, noted, result)
                if name in _NORMS and not torch.is_grad_enabled():
                    self.norms += _tensors(result)
                    self._norm_place = self._caller()
        except Exception as error:  # noqa: BLE001 - as above
            self._break(error)
        return result

    def _know(self, func: Any) -> Operator:
        name = func._schema.name
        name = name[6:] if name.startswith("aten::") else name
        schema = func._schema
        view = any(one.alias_info is not None for one in schema.returns)
        pure = _functional(func, name)
        turns = pure is not None and any(one.alias_info is not None for one in pure._schema.returns)
        known = Operator(name, str(func), schema.is_mutable, view, None if pure is None else str(pure), turns, name in FLOW)
        self._known[func] = known
        return known

    def _break(self, error: Exception) -> None:
        self.broken = f"{type(error).__name__}: {error}"
        log.warning("nanscope [tape-failed]: this step is not recorded (%s)", self.broken)

    def _arg(self, arg: Any) -> Arg:
        if isinstance(arg, Tensor):
            value = self.value_of(arg).id
            self._read.append(value)
            return Ref(value)
        if arg is None or isinstance(arg, (bool, int, float, str, torch.dtype, torch.device, torch.memory_format, torch.layout)):
            return arg
        if isinstance(arg, (list, tuple)):
            return tuple(self._arg(item) for item in arg)
        if isinstance(arg, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            raise Unseen
        raise Unseen

    def _key(self, tensor: Tensor, history: int) -> Key:
        if tensor.layout is not torch.strided or tensor.is_nested or type(tensor).__module__.startswith("torch._subclasses"):
            raise Unseen
        try:
            return (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, history)
        except RuntimeError:
            raise Unseen from None  # no memory of its own: a wrapper of some transform

    def find(self, tensor: Tensor) -> Value | None:
        """Return what the tape knows of a tensor, None if it never saw it or something else has written to it since."""
        history = _history(tensor)
        key = self._key(tensor, history)
        found = self.by_key.get(key)
        if found is None:
            return None
        value: Value | None = self.values[found]
        assert value is not None
        if history in self._mixed and value.tensor is not tensor:
            same = (self.values[i] for i in self.by_storage.get(value.storage, ()))
            value = next((v for v in same if v.tensor is tensor and v.key == key), None)
            if value is None:
                return None
        if value.guard is not None and value.guard.expired():
            return None
        version = _version(tensor)
        if value.version is None:
            value.version = version
        if value.version != version:
            return None  # something wrote to it, and we did not see what
        if value.tensor is None and value.guard is None and not value.bytes:
            value.bytes = tensor.numel() * tensor.element_size()
            self._hold(value, tensor)  # so far only writes to its memory had told us of it
        return value

    def _hold(self, value: Value, tensor: Tensor) -> bool:
        """Keep a tensor by reference, if the memory that it is a part of is within the budget; what is oldest makes room."""
        known = self._storages.get(value.storage)
        if known is None:
            size = tensor.untyped_storage().nbytes()
            if size > (self.wide if tensor.dim() > 2 else self.largest):
                return False
            while self.held + size > self.budget and self._lasting and not self._makes(self._lasting[0], value.id):
                self._drop(self._lasting.popleft())
            if self.held + size > self.budget and value.id not in self.made_by:
                self._make_room(size)
            if self.held + size > self.budget:
                return False
            known = self._storages[value.storage] = [0, size]
            self.held += size
        known[0] += 1
        value.tensor = tensor
        return True

    def _makes(self, index: int, held: int) -> bool:
        """Did a call make or introduce the value that is to be held, or one that the call being noted reads?"""
        entry = self.entries.get(index)
        return entry is not None and any(value in entry.outs or value in self._owned.get(index, ()) for value in (held, *self._read))

    def _make_room(self, size: int) -> None:
        """Let go of results until a leaf fits: they can be made again from their leaves, a leaf cannot."""
        for value_id in self.made_by:
            value = self.values.get(value_id)
            if value is not None and value.tensor is not None and not value.copied:
                value.guard = _Handle(value.tensor)
                self._release(value)
                if self.held + size <= self.budget:
                    return

    def _release(self, value: Value) -> None:
        """Let go of a tensor; its memory is off the account when nobody else here holds a part of it."""
        if value.tensor is None:
            return
        value.tensor = None
        if value.copied:
            self.held -= value.bytes
            return
        known = self._storages[value.storage]
        known[0] -= 1
        if not known[0]:
            self.held -= known[1]
            del self._storages[value.storage]

    def value_of(self, tensor: Tensor) -> Value:
        """Return what the tape knows of a tensor; a tensor that it does not know becomes a leaf."""
        return self.find(tensor) or self._leaf(tensor)

    def _leaf(self, tensor: Tensor) -> Value:
        diff = bool(tensor.requires_grad)
        opaque = self.opaque.pop(self._key(tensor, PLAIN)[:4], "") if self.opaque else ""
        module = "" if opaque else (self.module_outputs(tensor) or "")
        parameter = "" if opaque or module else (self.is_parameter(tensor) or "")
        if opaque.startswith(_EMPTY):
            kind, made_by = "data", "empty"
        elif opaque:
            kind, made_by = "opaque", opaque
        elif module:
            kind, made_by = "module", module
        elif parameter:
            kind, made_by = "parameter", parameter
        elif diff and (node := _node(tensor)) is not None:
            kind, made_by = "opaque", type(node).__name__.removesuffix("Backward")
        else:
            kind, made_by = "data", ""
        history = _history(tensor)
        value = self._register(tensor, history)
        base = tensor._base
        if history == id(tensor) and base is not None:
            value.alien = id(base)
            self._owners.setdefault(id(base), id(base) if base.requires_grad else history)
        value.version = _version(tensor)
        value.leaf = Leaf(value.id, parameter or None, kind, diff, made_by)
        return value

    def _register(self, tensor: Tensor, history: int, made: int | None = None) -> Value:
        key = self._key(tensor, history)
        pointer = _memory(tensor)
        value = Value(self._next, key, None, tensor.numel() * key[3].itemsize, None, pointer, history != PLAIN, key[1], key[3])
        self._next += 1
        if made is not None:
            self.made_by[value.id] = made
        if not self._hold(value, tensor):
            value.guard = _Handle(tensor)
        self.values[value.id] = value
        self.by_key[key] = value.id
        self.by_storage.setdefault(pointer, []).append(value.id)
        return value

    def _after_call(self, known: Operator, noted: Noted, result: Any) -> None:
        results: Sequence[Any] = result if isinstance(result, (tuple, list)) else (result,)
        if not any(isinstance(item, Tensor) for item in results):
            return
        if not known.replayable or (known.name == "as_strided" and not self._lies_as_numbered(noted)):
            self._forget_results(
                result, known.name
            )  # it becomes a leaf when it is read: only then is known whether a gradient flows through
            return
        self._append(known.overload, noted, results, known.name not in _DETACHING and self._flows(noted), known.view)

    def _lies_as_numbered(self, noted: Noted) -> bool:
        """Does the argument of `as_strided`, which counts in memory, lie in it from the first element on and without gaps?"""
        value = self.values[noted[0][0].id] if isinstance(noted[0][0], Ref) else None
        return value is not None and value.key[0] == value.storage and _dense(value) and not _turned(value)

    def _flows(self, noted: Noted) -> bool:
        if not torch.is_grad_enabled():
            return False
        values = self.values
        read = (i for args in (noted[0], noted[1]) for arg in args for i in _ids(arg))  # a name before an argument is no value
        return any(i in values and values[i].diff for i in read)

    def _will_be(self, item: Tensor, noted: Noted, diff: bool, view: bool | None) -> tuple[int, int | None]:
        """Return the history and the version that a result will have: autograd gives it both only after the call.

        view: is it one to autograd? None if it was written in place.
        """
        diff = diff and (item.is_floating_point() or item.is_complex())
        if view is None:
            return (id(item if item._base is None else item._base) if diff else PLAIN), _next_version(item)
        pointer = _memory(item)
        for arg in noted[0]:
            for value_id in _ids(arg):
                base = self.values.get(value_id)
                if base is not None and base.storage == pointer and item.numel():  # it counts its writes with its base
                    if not diff:
                        return PLAIN, base.version
                    if not view or not base.diff:
                        return id(item), base.version
                    if base.alien and self._owners.setdefault(base.alien, base.history) != base.history:
                        self._mixed.add(base.alien)
                    return base.alien or base.history, base.version
        return (id(item) if diff else PLAIN), _version(item)

    def _append(self, op: str, noted: Noted, results: Sequence[Any], diff: bool, view: bool | None) -> list[int | None]:
        outs: list[int | None] = []
        index = self.count
        lasting = not diff
        for item in results:
            if isinstance(item, Tensor):
                history, version = self._will_be(item, noted, diff, view)
                value = self._register(item, history, index)
                value.version = version
                outs.append(value.id)
                lasting = lasting and value.bytes <= REMEMBERED
            else:
                outs.append(None)
        code, lasti = self._caller()
        self._number(Entry(op, noted[0], noted[1], tuple(outs), torch.is_grad_enabled(), code, lasti, self.current_module), lasting)
        for position, arg in enumerate(noted[0]):
            for value_id in _ids(arg):
                read = self.values.get(value_id)
                if read is not None and read.leaf is not None and read.position is None:
                    read.position = (index, position)
                    self._owned.setdefault(index, []).append(value_id)
        return outs

    def _number(self, entry: Entry, lasting: bool) -> None:
        self.entries[self.count] = entry
        if lasting:
            self._lasting.append(self.count)
            if len(self._lasting) > RING:
                self._drop(self._lasting.popleft())
        else:
            self._passing.append(self.count)
        self.count += 1

    def _forget_results(self, result: Any, op: str = "") -> None:
        for item in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(item, Tensor) and item.layout is torch.strided and not item.is_nested:
                place = self._key(item, PLAIN)[:4]
                for value_id in self.by_storage.get(_memory(item), ()):
                    if (known := self.values[value_id].key)[:4] == place:
                        self.by_key.pop(known, None)
                if op and (op not in _DATA or op.startswith(_EMPTY)):
                    self.opaque[place] = op

    # -- in-place writes -------------------------------------------------------------------------------------------------

    def _before_write(self, tensor: Any, turns: bool) -> Value | None:
        """Save what a write is about to destroy: a leaf's content, by copy, while it is small enough to keep.

        Without gradient it is most often gradients that are clipped in place: large ones are not worth a copy in every step.
        """
        if not isinstance(tensor, Tensor):
            return None
        target = self.value_of(tensor)
        for value_id in self.by_storage.get(target.storage, ()):
            value = self.values.get(value_id)
            if value is None or value.tensor is None or value.copied or (turns and value.tensor is not tensor):
                continue
            content, intact = value.tensor, _intact(value)
            if value.leaf is not None or value.id != target.id:
                self._release(value)
            if value.leaf is not None and intact and (value.bytes <= REMEMBERED or torch.is_grad_enabled()):
                value.tensor, value.copied = _copy(value, content), True
                self.held += value.bytes
        return target

    def _forget_memory(self, tensors: Iterator[Tensor]) -> None:
        """Something was written that has no functional form: whoever is read next becomes a leaf, with the content it has then."""
        for tensor in tensors:
            if tensor.layout is torch.strided and not tensor.is_nested:
                for value_id in self.by_storage.get(tensor.untyped_storage().data_ptr(), ()):
                    value = self.values.get(value_id)
                    if value is not None:
                        self.by_key.pop(value.key, None)
                        self._release(value)

    def _after_write(self, known: Operator, noted: Noted, target: Value | None, args: tuple[Any, ...], result: Any) -> None:
        tensor = args[0] if args else None
        if not isinstance(tensor, Tensor) or target is None:
            self._forget_memory(_tensors((args, result)))
            return
        if known.turns:
            self._after_turn(known, noted, target, tensor)
            return
        relatives = [self.values[i] for i in self.by_storage.get(target.storage, ()) if i in self.values]
        live = [v for v in relatives if self.by_key.get(v.key) == v.id and v.id != target.id and v.key != target.key]
        for value in relatives:
            self.by_key.pop(value.key, None)
        if target.leaf is None:
            self._release(target)
        overload, noted = self._without_write(known, noted, tensor)
        if overload is None or _overlaps(target) or self._reads_what_it_writes(known, noted, target):
            self._forget_memory(_tensors((args, result)))
            self._forget_results(tensor, known.name)
            return
        # A constant that is written into a part of a tensor does not end the gradient of the rest.
        diff = self._flows(noted) or (target.diff and torch.is_grad_enabled())
        written = self._append(overload, noted, [tensor], diff, None)[0]
        if written is None:
            return
        if tensor.dtype is not _promoted(noted, self.values):
            self._then(written, [("aten._to_copy.default", (), (("dtype", tensor.dtype),))])
        if _dense(target) and self._lies_otherwise(known, noted, target):
            # The order in which a sum adds is that of memory: the functional form has to lie as what was written does.
            order = _memory_order(target)
            back = tuple(order.index(n) for n in range(len(order)))
            clone: Step = ("aten.clone.default", (), (("memory_format", torch.contiguous_format),))
            turn: list[Step] = [("aten.permute.default", (order,), ()), clone, ("aten.permute.default", (back,), ())]
            self._then(written, turn if _turned(target) else [clone])
        self._spread(self.values[written], target, live, tensor)

    def _after_turn(self, known: Operator, noted: Noted, target: Value, tensor: Tensor) -> None:
        """No element was written, but whoever shares the memory counts a write."""
        detached = known.name == "detach_"
        now, after = _version(tensor), _version(tensor) if detached else _next_version(tensor)
        for value_id in self.by_storage.get(target.storage, ()):
            value = self.values[value_id]
            if value.tensor is tensor:
                self._release(value)
            if detached and value.history == target.history:
                self.by_key.pop(value.key, None)  # what was a view of it may lose its gradient, too
            elif value.version == now and not value.copied:
                value.version = after
        (written,) = self._append(known.functional or "", noted, [tensor], not detached and self._flows(noted), None)
        if written is not None:
            self.values[written].version = after

    def _lies_otherwise(self, known: Operator, noted: Noted, target: Value) -> bool:
        """May the functional form of a write give the same elements in another order of memory?"""
        if known.name != "copy_":
            return _turned(target)
        source = self.values.get(noted[0][0].id) if isinstance(noted[0][0], Ref) else None
        return source is None or source.key[1:3] != target.key[1:3]

    def _reads_what_it_writes(self, known: Operator, noted: Noted, target: Value) -> bool:
        """Does a write read elements that it has written already? Which of them are new then, not even torch says."""
        pointwise = known.name == "copy_" or FLOW.get(known.name.rstrip("_")) is Flow.POINTWISE
        for arg in (*noted[0][known.name != "copy_" :], *(arg for _, arg in noted[1])):
            for value_id in _ids(arg):
                other = self.values.get(value_id)
                if other is None or other.storage != target.storage or (pointwise and other.key[:4] == target.key[:4]):
                    continue
                if _meet(other, target):
                    return True
        return False

    def _without_write(self, known: Operator, noted: Noted, tensor: Tensor) -> tuple[str | None, Noted]:
        """Return the functional form of an in-place call and its arguments, None if it has none that can be replayed."""
        args, kwargs = noted
        if known.name == "copy_":
            return "aten.expand.default", ((args[1], tuple(tensor.shape)), ())  # aten.copy has no derivative
        if known.name == "zero_":
            return "aten.fill.Scalar", ((args[0], 0.0 if tensor.is_floating_point() else 0), ())
        if known.functional is None or not known.name.endswith("_") or known.name.rstrip("_") not in FLOW:
            return None, noted
        return known.functional, (args, kwargs)

    def _then(self, written: int, steps: list[Step]) -> None:
        """Let calls follow on the functional form of a write: the last of them gives what was written."""
        value = self.values[written]
        last = self.entries[self.count - 1]
        raw = self._unseen(value.shape, value.dtype, value.diff)
        self.entries[self.count - 1] = replace(last, outs=(raw,))
        self.made_by[raw] = self.count - 1
        for n, (op, args, kwargs) in enumerate(steps):
            made = written if n == len(steps) - 1 else self._unseen(value.shape, value.dtype, value.diff)
            self.made_by[made] = self.count
            self._number(replace(last, op=op, args=(Ref(raw), *args), kwargs=kwargs, outs=(made,)), not value.diff)
            raw = made

    def _unseen(self, shape: tuple[int, ...], dtype: torch.dtype, diff: bool) -> int:
        """Number a value that no tensor of the trainer's stands for."""
        value = Value(self._next, (0, (), (), dtype, PLAIN), None, 0, None, -1, diff, shape, dtype)
        self._next += 1
        self.values[value.id] = value
        return value.id

    def _spread(self, written: Value, target: Value, live: list[Value], tensor: Tensor) -> None:
        """Carry a write to the other tensors that share its memory, through the one that covers all of it."""
        # What is written through an alias of another history changes a value behind autograd's back: that value is a leaf when it is next
        # read. So does what was written to it unseen, and an unseen `detach_` changes the history of all.
        now, base = (None, _version(tensor)), tensor if tensor._base is None else tensor._base
        known = (PLAIN, written.history if base.requires_grad else PLAIN)
        live = [v for v in live if v.id in self.values and v.version in now and v.history in known]
        if not live:
            return
        storage = tensor.untyped_storage()
        self._written = written.history, _next_version(tensor)
        whole = [v for v in [target, *live] if v.dtype is tensor.dtype and _covers(v, storage)]
        if not whole:
            return
        # Of two that are the same memory, the one that has the gradient: a write without gradients leaves one that has none beside it.
        root = target if whole[0] is target else next((value for value in whole if value.diff), whole[0])
        _, shape, stride, _, _ = target.key
        item = tensor.element_size()
        if root.id == target.id:
            fresh = written
        else:
            offset = (target.key[0] - root.key[0]) // item
            fresh = self._scatter(root, written, shape, stride, offset)
        plain = self._in_memory_order(fresh, root)
        for value in live:
            if value.id == root.id or value.dtype is not root.dtype:
                continue
            offset = (value.key[0] - root.key[0]) // item
            self._pseudo("aten.as_strided.default", ((Ref(plain), value.key[1], value.key[2], offset), ()), value)

    def _scatter(self, root: Value, written: Value, shape: tuple[int, ...], stride: tuple[int, ...], offset: int) -> Value:
        """Put a written view back into the tensor that covers its memory.

        By explicit positions: torch 2.13's as_strided_scatter does this in one call and returns a wrong gradient.
        """
        size = math.prod(root.shape)
        every = self._hidden("aten.arange.default", (size,), (size,), torch.int64)
        viewed = self._hidden("aten.as_strided.default", (Ref(every), shape, stride, offset), shape, torch.int64)
        places = self._hidden("aten.reshape.default", (Ref(viewed), (-1,)), (math.prod(shape),), torch.int64)
        content = self._hidden("aten.reshape.default", (Ref(written.id), (-1,)), (math.prod(shape),), root.dtype)
        flat = self._in_memory_order(root, root)
        whole = self._hidden("aten.scatter.src", (Ref(flat), 0, Ref(places), Ref(content)), (size,), root.dtype)
        order = _memory_order(root)
        lying = tuple(root.shape[n] for n in order)
        if order == tuple(range(len(order))):
            return self._pseudo("aten.reshape.default", ((Ref(whole), root.shape), ()), root)
        laid = self._hidden("aten.reshape.default", (Ref(whole), lying), lying, root.dtype)
        back = tuple(order.index(n) for n in range(len(order)))
        return self._pseudo("aten.permute.default", ((Ref(laid), back), ()), root)

    def _in_memory_order(self, value: Value, like: Value) -> int:
        """A value as a flat tensor, in the order in which `like` lies in memory; how a replay lays it out may differ."""
        order = _memory_order(like)
        known = value.id
        if order != tuple(range(len(order))):
            known = self._hidden("aten.permute.default", (Ref(known), order), tuple(like.shape[n] for n in order), like.dtype)
        flat = self._hidden("aten.reshape.default", (Ref(known), (-1,)), (math.prod(like.shape),), like.dtype)
        return self._hidden("aten.clone.default", (Ref(flat),), (math.prod(like.shape),), like.dtype)

    def _hidden(
        self, op: str, args: tuple[Arg, ...], shape: tuple[int, ...], dtype: torch.dtype, kwargs: tuple[tuple[str, Arg], ...] = ()
    ) -> int:
        """Add a call that the trainer did not make, and whose result no tensor of his stands for."""
        value = self.values[self._unseen(shape, dtype, self._flows((args, ())))]
        self._note_made(op, args, value, value.diff, kwargs)
        return value.id

    def _pseudo(self, op: str, noted: Noted, like: Value) -> Value:
        """Add a call that the trainer did not make: the functional form of what a write to shared memory did to `like`."""
        diff = self._flows(noted)
        history, version = self._written
        key: Key = (*like.key[:4], history if diff else PLAIN)
        value = Value(self._next, key, None, 0, version, like.storage, diff, like.shape, like.dtype)
        self._next += 1
        self.values[value.id] = value
        self.by_key[key] = value.id
        self.by_storage.setdefault(like.storage, []).append(value.id)
        self._note_made(op, noted[0], value, diff)
        return value

    def _note_made(self, op: str, args: tuple[Arg, ...], value: Value, diff: bool, kwargs: tuple[tuple[str, Arg], ...] = ()) -> None:
        self.made_by[value.id] = self.count
        last = self.entries[self.count - 1]
        self._number(Entry(op, args, kwargs, (value.id,), torch.is_grad_enabled(), last.code, last.lasti, last.module), not diff)

    # -- positions -------------------------------------------------------------------------------------------------------

    def _caller(self) -> tuple[CodeType | None, int]:
        frame: FrameType | None = sys._getframe(2)
        users = self._users
        while frame is not None:
            code = frame.f_code
            user = users.get(code)
            if user is None:
                user = users[code] = is_user(code.co_filename)
                if user and (site := _loss_site(code)) is not None:
                    self._sites[code] = site
            if user:
                if code in self._sites and code not in self.glimpses:
                    self._glimpse(self._sites[code], frame)
                return code, frame.f_lasti
            if code is _SCALE:
                self.scaled = True
            frame = frame.f_back
        return None, -1

    def _glimpse(self, site: LossSite, frame: FrameType) -> None:
        """Look at the options that a loss function runs under, and hold what a kernel is given; once a function and step."""
        self.glimpses[frame.f_code] = Glimpse(site, {})
        variables = frame.f_locals
        try:
            self.glimpses[frame.f_code] = glimpse(site, variables)
            for name in site.kernel.tensors_read() if site.kernel is not None else ():
                tensor = variables.get(name)
                if isinstance(tensor, Tensor):
                    self.taken[name] = self._take(tensor)
        except Exception as error:  # noqa: BLE001 - a config object may do anything when it is asked
            log.warning("nanscope [settings-unread]: %s of %s (%s: %s)", site.function, site.file, type(error).__name__, error)
        if type(variables) is dict:
            variables.clear()  # a copy, which would keep alive what the function lets go of

    def _take(self, tensor: Tensor) -> Taken:
        """Hold an argument of a kernel until `forget`: a parameter is there anyway, anything else counts against the budget."""
        size = 0 if isinstance(tensor, torch.nn.Parameter) else tensor.numel() * tensor.element_size()
        fits = self.held + size <= self.budget
        self.held += size if fits else 0
        return Taken(tensor if fits else None, _version(tensor), size if fits else 0, address(tensor))

    # -- reading ---------------------------------------------------------------------------------------------------------

    @property
    def length(self) -> int:
        """How many values were numbered so far."""
        return self._next

    def norm_site(self) -> Site | None:
        """Return where the last of `norms` was taken."""
        code, lasti = self._norm_place
        return None if code is None else site_of(code, lasti)

    def tag(self, name: str, tensor: Tensor) -> None:
        """Name a tensor where its variable does not tell what it means."""
        value = self.value_of(tensor)
        self.tags[name] = value.id

    def program(self, output: Value) -> tuple[Program, dict[int, Tensor]]:
        """Return the slice that makes `output`, cut where tensors are missing, and the tensors of its leaves.

        Raises LookupError if the output itself was not kept and cannot be recomputed.
        """
        needed: dict[int, None] = {}
        chosen: set[int] = set()
        stack = [output.id]
        while stack:
            value_id = stack.pop()
            if value_id in needed:
                continue
            needed[value_id] = None
            index = self.made_by.get(value_id)
            if index is None or not self._reachable(index):
                continue
            if index not in chosen:
                chosen.add(index)
                entry = self.entries[index]
                for arg in (*entry.args, *(arg for _, arg in entry.kwargs)):
                    stack.extend(_ids(arg))
        order = sorted(chosen)
        sites: list[Site] = []
        known: dict[tuple[CodeType, int], int] = {}
        calls: list[Call] = []
        names = {value_id: name for name, value_id in self.tags.items()}
        for index in order:
            entry = self.entries[index]
            site = -1
            if entry.code is not None:
                place = (entry.code, entry.lasti)
                if place not in known:
                    known[place] = len(sites)
                    sites.append(site_of(*place))
                site = known[place]
            tag = next((names[out] for out in entry.outs if out in names), None)
            if tag is not None:  # a site of its own, which carries the name
                at = sites[site] if site >= 0 else Site("", 0, "")
                sites.append(replace(at, name=tag))
                site = len(sites) - 1
            calls.append(Call(entry.op, entry.args, entry.kwargs, entry.outs, site, entry.grad, entry.module))
        made = {out for call in calls for out in call.outs if out is not None}
        read = {i for call in calls for i in call.inputs()} | {output.id}
        leaves: list[Leaf] = []
        tensors: dict[int, Tensor] = {}
        for value_id in sorted(read - made):
            value = self.values[value_id]
            if value.tensor is None or not _intact(value):
                raise LookupError(f"value {value_id} {list(value.shape)} was not kept, or written to unseen")
            leaf = value.leaf or Leaf(value_id, None, "cut", value.diff, "")
            name = names.get(value_id) or leaf.name or self._name_of(value, calls, order, sites)
            leaves.append(Leaf(value_id, name, leaf.origin, value.diff, leaf.made_by))
            tensors[value_id] = value.tensor
        return Program(tuple(leaves), tuple(calls), output.id, tuple(sites)), tensors

    def _reachable(self, index: int) -> bool:
        """A call can be replayed if all that it reads was kept or can itself be made again."""
        state = self._replayable
        if index in state:
            return state[index]
        stack = [index]
        while stack:
            current = stack[-1]
            if current in state:
                stack.pop()
                continue
            entry = self.entries[current]
            waiting, ok = [], True
            for arg in (*entry.args, *(arg for _, arg in entry.kwargs)):
                for value_id in _ids(arg):
                    made = self.made_by.get(value_id)
                    value = self.values.get(value_id)
                    if value is None:
                        ok = False
                    elif made is None:
                        ok = ok and _intact(value)
                    elif made in state:
                        ok = ok and (state[made] or _intact(value))
                    elif value.diff or not _intact(value):
                        waiting.append(made)
            if waiting and ok:
                stack.extend(waiting)
                continue
            state[current] = ok
            stack.pop()
        return state[index]

    @property
    def _replayable(self) -> dict[int, bool]:
        # Valid for as long as the tape has this length.
        if self._replay_cache[0] != self.count:
            self._replay_cache = (self.count, {})
        return self._replay_cache[1]

    def _name_of(self, value: Value, calls: list[Call], order: list[int], sites: list[Site]) -> str | None:
        """A value is called what its first reader calls it, or what it was bound to where it was made."""
        made = self.made_by.get(value.id)
        if made is not None:
            entry = self.entries[made]
            site = site_of(entry.code, entry.lasti) if entry.code is not None else None
            if site is not None and site.name:
                return site.name
        for index, call in zip(order, calls, strict=True):
            if value.position is not None and value.position[0] != index and value.id not in set(call.inputs()):
                continue
            for position, arg in enumerate(call.args):
                if value.id in _ids(arg) and call.site >= 0:
                    if call.op.startswith("aten.lift_fresh"):  # a literal: `torch.tensor(…)` is called what it is bound to
                        return sites[call.site].name
                    words = sites[call.site].args
                    if position < len(words):
                        # `0.01 * x` arrives as (x, 0.01): the word at the tensor's place is the number
                        other = len(words) == 2 and _NUMBER.fullmatch(words[position])
                        return words[1 - position if other else position]
        return None

    # -- forgetting ------------------------------------------------------------------------------------------------------

    def forget(self, everything: bool = False) -> None:
        """Drop what belongs to a finished backward pass; small values without gradient stay, so that a batch prepared once
        (rewards, advantages) is still explained in its later micro-batches."""
        if everything or self.broken or self.held > self.budget // 2:
            self.entries.clear()
            self.values.clear()
            self.by_key.clear()
            self.by_storage.clear()
            self.made_by.clear()
            self._lasting.clear()
            self._owned.clear()
            self._storages.clear()
            self.held = 0
        else:
            for index in self._passing:
                self._drop(index)
        self._passing.clear()
        self.tags = {name: i for name, i in self.tags.items() if i in self.values}
        self.broken = ""
        self.scaled = False
        self.held -= sum(taken.bytes for taken in self.taken.values()) if self.held else 0
        self.glimpses = {}
        self.taken = {}
        self.norms = []
        self.opaque = {}
        self._owners.clear()
        self._mixed.clear()
        self._replay_cache = (-1, {})

    def _drop(self, index: int) -> None:
        """Forget one call, what it made, and the leaves that only it introduced."""
        entry = self.entries.pop(index, None)
        if entry is None:
            return
        for value_id in (*(out for out in entry.outs if out is not None), *self._owned.pop(index, ())):
            value = self.values.pop(value_id, None)
            if value is None:
                continue
            self.made_by.pop(value_id, None)
            if self.by_key.get(value.key) == value_id:
                del self.by_key[value.key]
            relatives = self.by_storage.get(value.storage)
            if relatives is not None:
                if value_id in relatives:
                    relatives.remove(value_id)
                if not relatives:
                    del self.by_storage[value.storage]
            self._release(value)


def _loss_site(code: CodeType) -> LossSite | None:
    """Return the row of a function in which a framework computes its loss, None if it is not one or its variables are not ours to read."""
    site = site_in(code.co_filename, code.co_qualname)
    return site if site is not None and site.key is not None and is_open(code) else None


def is_user(file: str) -> bool:
    """Code of the trainer, as opposed to torch's and our own (the demo is a trainer, and a kernel's formula may be our objective)."""
    if file.startswith(_OURS):
        return file.endswith(("demo.py", "objective.py"))
    return not (file.startswith((_TORCH, "<")) or file.endswith("contextlib.py"))


def _ids(arg: Arg) -> Iterator[int]:
    if isinstance(arg, Ref):
        yield arg.id
    elif isinstance(arg, tuple):
        for item in arg:
            yield from _ids(item)


def _tensors(tree: Any) -> Iterator[Tensor]:
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, (list, tuple)):
        for item in tree:
            yield from _tensors(item)


def _history(tensor: Tensor) -> int:
    """Return what tells tensors of the same memory apart by the way that a gradient takes: the identity of the tensor that they are views
    of, PLAIN if there is no gradient."""
    if not tensor.requires_grad:
        return PLAIN
    base = tensor._base
    if base is None:
        return id(tensor)
    try:
        node: object = tensor.grad_fn
        # A view that was made under no_grad leads nowhere, and one that a custom function returns leads where the function wants.
        return id(tensor if node is None or isinstance(node, BackwardCFunction) else base)
    except RuntimeError:  # a view made without gradient, of a tensor that was written to since: autograd itself will not have it
        return PLAIN


def _node(tensor: Tensor) -> object | None:
    """Return the autograd node that made a tensor."""
    try:
        return tensor.grad_fn
    except RuntimeError:  # as above
        return None


def _memory(tensor: Tensor) -> int:
    """Return the address of the memory that a tensor is a part of."""
    pointer = tensor.data_ptr()
    return pointer - int(tensor.storage_offset()) * tensor.element_size() if pointer else 0


def _next_version(tensor: Tensor) -> int:
    """The count that a tensor will have when the write which is being seen has been counted."""
    return 0 if tensor.is_inference() else tensor._version + 1


def _intact(value: Value) -> bool:
    """Does a held tensor still hold what was read from it?"""
    if value.tensor is None:
        return False
    return value.copied or (value.tensor.data_ptr() == value.key[0] and value.version in (None, _version(value.tensor)))


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _functional(func: Any, name: str) -> Any | None:
    """aten.mul_.Tensor → aten.mul.Tensor, if that exists and takes the same arguments."""
    packet = getattr(torch.ops.aten, name.rstrip("_"), None)
    found = getattr(packet, func._overloadname, None) if packet is not None else None
    if found is None or found._schema.is_mutable:
        return None
    ours, theirs = ([(a.name, str(a.type)) for a in f._schema.arguments] for f in (func, found))
    return found if ours == theirs else None


def _promoted(noted: Noted, values: dict[int, Value]) -> torch.dtype | None:
    """The dtype that the functional form of a write would give: the target's own unless a wider tensor takes part."""
    first = noted[0][0] if noted[0] else None
    if not isinstance(first, Ref):
        return None
    dtype = values[first.id].dtype
    for arg in noted[0][1:]:
        if isinstance(arg, Ref):
            other = values[arg.id]
            if other.shape or not dtype.is_floating_point:
                dtype = torch.promote_types(dtype, other.dtype)
        elif isinstance(arg, float) and not dtype.is_floating_point and not dtype.is_complex:
            dtype = torch.get_default_dtype()
    return dtype


def _memory_order(value: Value) -> tuple[int, ...]:
    """The dimensions of a value from the slowest to the fastest in memory."""
    _, shape, stride, _, _ = value.key
    return tuple(sorted(range(len(shape)), key=lambda n: (-stride[n], -shape[n], n)))


def _overlaps(value: Value) -> bool:
    """Are several elements of a value one memory, as those of an expanded row are? What is written into one of them stands in all."""
    _, shape, stride, _, _ = value.key
    reach = 0  # elements between the first and the last of the dimensions so far
    for n in reversed(_memory_order(value)):
        if shape[n] > 1:
            if stride[n] <= reach:
                return True
            reach += (shape[n] - 1) * stride[n]
    return False


def _turned(value: Value) -> bool:
    """Do the dimensions of a value lie in another order than they are counted in?"""
    return _memory_order(value) != tuple(range(len(value.shape)))


def _copy(value: Value, content: Tensor) -> Tensor:
    """Return a copy that lies as the original does, if that takes no more memory: the order in which a sum adds is that of memory."""
    _, shape, stride, _, _ = value.key
    if not _overlaps(value):
        return content.detach().clone()
    reach = 1 + sum((n - 1) * step for n, step in zip(shape, stride, strict=True))
    return content.detach().as_strided((reach,), (1,)).clone().as_strided(shape, stride)


def _dense(value: Value) -> bool:
    """Does a value lie without gaps, in whatever order of dimensions?"""
    _, shape, stride, _, _ = value.key
    size = 1
    for n in reversed(_memory_order(value)):
        if shape[n] != 1 and stride[n] != size:
            return False
        size *= shape[n]
    return True


def _covers(value: Value, storage: Any) -> bool:
    """Does a value lie in all of its memory, without gaps?"""
    pointer, shape, _, dtype, _ = value.key
    return bool(pointer == storage.data_ptr() and math.prod(shape) * dtype.itemsize == storage.nbytes()) and _dense(value)


def _meet(one: Value, other: Value) -> bool:
    """Do two values share any element of the memory that both are a part of?"""
    item = one.dtype.itemsize
    ends = [v.key[0] + item * (1 + sum((n - 1) * step for n, step in zip(v.shape, v.key[2], strict=True))) for v in (one, other)]
    if 0 in one.shape or 0 in other.shape or one.key[0] >= ends[1] or other.key[0] >= ends[0]:
        return False
    if other.dtype.itemsize != item or (one.key[0] - other.key[0]) % item:
        return True
    first = min(one.key[0], other.key[0])
    taken = torch.zeros((max(ends) - first) // item, dtype=torch.bool, device="cpu")
    parts = [taken.as_strided(v.shape, v.key[2], (v.key[0] - first) // item) for v in (one, other)]
    parts[0].fill_(True)
    return bool(parts[1].any())


class _Handle:
    """A weak handle on a tensor that is not kept: its memory and its identity are not taken for those of what follows it there."""

    __slots__ = ("_storage", "_tensor")

    def __init__(self, tensor: Tensor) -> None:
        self._storage = tensor.untyped_storage()._weak_ref()
        self._tensor = _WeakTensorRef(tensor) if tensor.requires_grad and tensor._base is None else None

    def expired(self) -> bool:
        return bool(torch.UntypedStorage._expired(self._storage)) or (self._tensor is not None and self._tensor.expired())

    def __del__(self) -> None:
        free = getattr(getattr(torch, "UntypedStorage", None), "_free_weak_ref", None)
        if free is not None:  # None while the interpreter shuts down
            free(self._storage)


class TapeMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Feeds a tape. Compiled regions are left alone: they stay compiled, and their results are leaves."""

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __init__(self, tape: Tape) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.tape = tape
        self.suspended = 0
        self._popped = 0

    def suspend(self) -> None:
        """Step aside: off the stack where we are on top of it, else passing calls through. Nests."""
        self.suspended += 1
        if self.suspended == 1 and _get_current_dispatch_mode() is self:
            _pop_mode()
            self._popped = 1

    def resume(self) -> None:
        """Undo one `suspend`."""
        if self.suspended == 1 and self._popped:
            _push_mode(self)
            self._popped = 0
        self.suspended = max(0, self.suspended - 1)

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if self.suspended or torch._C._current_graph_task_id() != -1:  # or a backward pass that we did not see begin
            return func(*args, **kwargs)
        return self.tape.note(func, args, kwargs, lambda: func(*args, **kwargs))
