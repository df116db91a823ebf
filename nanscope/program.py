"""The loss as a program: the aten calls between the model's outputs and the scalar, as data.

    Leaf(id=0, name='per_token_logps', …)                       what comes in, by reference to a tensor
    Call('aten.sub.Tensor', (Ref(0), Ref(1)), out=(2,), site=0)
    Call('aten.exp.default', (Ref(2),), out=(3,), site=1)

A program is pure: every call makes new values, every value has one id, nothing is overwritten (in-place operators are recorded in
their functional form). So a slice is a walk, an edit is an insertion, and a run is a loop. In a file it is JSON: operator names from a
whitelist, arguments, positions in the source. There is no code in it.
"""

from __future__ import annotations

import contextlib
import math
import re
from collections import ChainMap
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import partial
from typing import Any, TypeAlias, Union, cast

import torch
from torch import Tensor

from nanscope.errors import ProgramError
from nanscope.ops import FLOW, base_name
from nanscope.shelf import Put, Shelf, Shelved, took

MAX_ELEMENTS = 1 << 31  # one result of a program from a file; beyond it the file is refused, not executed


@dataclass(frozen=True, slots=True)
class Ref:
    """An argument that is a value of the program."""

    id: int


# Scalars as they are; torch.dtype, torch.device and torch.memory_format by name in a file.
Arg: TypeAlias = Union[Ref, "tuple[Arg, ...]", bool, int, float, str, torch.dtype, torch.device, torch.memory_format, torch.layout, None]


@dataclass(frozen=True, slots=True)
class Site:
    """Where in the source a call was made.

    line, column: the call's expression (1-based line, 0-based column); end_line, end_column: its end.
    name: the variable that the expression is bound to, None if it is part of a larger expression.
    within: the variable that the whole statement is bound to. expression: the text of the call itself. args: the text of its
    arguments, receiver first.
    source: the lines of the statement with a few around it, as (line number, text).
    """

    file: str
    line: int
    function: str
    column: int = 0
    end_line: int = 0
    end_column: int = 0
    name: str | None = None
    within: str | None = None
    expression: str = ""
    args: tuple[str, ...] = ()
    source: tuple[tuple[int, str], ...] = ()


class Computes(StrEnum):
    """What a program ends in: the loss, a gradient as the trainer changed it after backward, a weight after the optimizer's update, or a
    value inside the model."""

    LOSS = "loss"
    GRADIENT = "gradient"
    UPDATE = "update"
    ACTIVATION = "activation"


@dataclass(frozen=True, slots=True)
class Leaf:
    """A tensor that comes into the program from outside.

    origin: "data" (batch, constant), "module" (output of a module), "parameter", or "opaque" (made by a call that cannot be replayed).
    made_by: the module's class and path, or the operator. diff: a gradient flows back through it. role: what it means, where what told so
    has been cut off.
    """

    id: int
    name: str | None
    origin: str
    diff: bool
    made_by: str = ""
    role: str = ""


@dataclass(frozen=True, slots=True)
class Call:
    """One aten call. grad: recorded with gradients enabled. site: index into the program's sites, -1 if unknown."""

    op: str
    args: tuple[Arg, ...]
    kwargs: tuple[tuple[str, Arg], ...]
    outs: tuple[int | None, ...]
    site: int = -1
    grad: bool = True
    module: str = ""

    def inputs(self) -> Iterator[int]:
        """Yield the ids of the values that the call reads, in order of its arguments."""
        yield from refs(self.args)
        for _, value in self.kwargs:
            yield from refs(value)


def refs(arg: Arg) -> Iterator[int]:
    """Yield the ids inside an argument."""
    if isinstance(arg, Ref):
        yield arg.id
    elif isinstance(arg, tuple):
        for item in arg:
            yield from refs(item)


def substitute(arg: Arg, mapping: Mapping[int, int]) -> Arg:
    """Return the argument with ids replaced."""
    if isinstance(arg, Ref):
        return Ref(mapping.get(arg.id, arg.id))
    if isinstance(arg, tuple):
        return tuple(substitute(item, mapping) for item in arg)
    return arg


def _resolve(arg: Arg, values: Mapping[int, Tensor], dtype: torch.dtype | None, device: torch.device) -> Any:
    if isinstance(arg, Ref):
        try:
            return values[arg.id]
        except KeyError:
            raise ProgramError(f"the program reads value {arg.id} before it is made", slug="program-missing-value") from None
    if isinstance(arg, tuple):
        return [_resolve(item, values, dtype, device) for item in arg]
    if isinstance(arg, torch.dtype) and dtype is not None and arg.is_floating_point:
        return dtype
    if isinstance(arg, torch.device):
        return device  # a step is replayed where its tensors are
    return arg


def overload(op: str) -> Any:
    """Return the aten overload named `op` ("aten.exp.default").

    Raises ProgramError for anything outside the whitelist, so a name from a file can never reach other code.
    """
    match = re.fullmatch(r"aten\.([a-z_0-9]+)\.([A-Za-z_0-9]+)", op)
    if not match or match[1] not in FLOW:
        raise ProgramError(f"operator {op!r} is not in the whitelist of replayable operators", slug="program-unknown-op")
    packet = getattr(torch.ops.aten, match[1], None)
    found = getattr(packet, match[2], None) if packet is not None and match[2] in packet.overloads() else None
    if found is None or found._schema.is_mutable:
        raise ProgramError(f"operator {op!r} does not exist in torch {torch.__version__} or is not functional", slug="program-unknown-op")
    return found


def perform(
    call: Call,
    values: Mapping[int, Tensor],
    dtype: torch.dtype | None,
    device: torch.device,
    grad: bool,
    room: int | None = MAX_ELEMENTS,
    index: int = 0,
) -> tuple[list[Any], int]:
    """Execute one call on the values it reads; return its results and how many elements they have.

    dtype: compute in this floating dtype instead of the recorded one. grad: with gradients.
    room: the most elements it may make, None if there is enough. index: its place in the program, for the error.
    Raises ProgramError if it cannot be executed.
    """
    function = overload(call.op)
    args = [_resolve(arg, values, dtype, device) for arg in call.args]
    kwargs = {name: _resolve(arg, values, dtype, device) for name, arg in call.kwargs}
    if dtype is not None and kwargs.get("dtype") is None and _makes_floats(call, args):
        kwargs["dtype"] = dtype
    try:
        size = 0 if room is None else _elements(call, function, args, kwargs)
        if room is not None and size > room:
            raise ProgramError(f"call {index} ({call.op}) takes the program beyond {MAX_ELEMENTS} elements", slug="program-too-large")
        with torch.set_grad_enabled(grad):
            result = function(*args, **kwargs)
    except _FAILURES as error:
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ProgramError(f"call {index} ({call.op}) failed: {first}", slug="program-call-failed") from error
    return (list(result) if isinstance(result, (tuple, list)) else [result]), size


@dataclass(frozen=True, slots=True)
class Run:
    """What executing a program gave.

    values: every value by id. grads: the gradient of the output with respect to every differentiable value, where backward reached it.
    returned: for each call index that backward visited, the gradients that its autograd node returned, in argument order.
    order: the call indices in the order in which backward visited them.
    What is large stands in a file and is mapped when it is read: do not write to it.
    """

    values: Mapping[int, Tensor]
    grads: Mapping[int, Tensor] = field(default_factory=dict)
    returned: Mapping[int, tuple[Tensor | None, ...]] = field(default_factory=dict)
    order: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Program:
    """Leaves, calls in order, the id of the value they end in, and what that value is."""

    leaves: tuple[Leaf, ...]
    calls: tuple[Call, ...]
    output: int
    sites: tuple[Site, ...] = ()
    computes: Computes = Computes.LOSS

    def producer(self, value: int) -> int | None:
        """Return the index of the call that makes a value, None for a leaf."""
        return self.producers().get(value)

    def producers(self) -> dict[int, int]:
        """Return value id → index of the call that makes it."""
        return {out: index for index, call in enumerate(self.calls) for out in call.outs if out is not None}

    def consumers(self) -> dict[int, list[int]]:
        """Return value id → indices of the calls that read it, in order."""
        found: dict[int, list[int]] = {}
        for index, call in enumerate(self.calls):
            for value in dict.fromkeys(call.inputs()):
                found.setdefault(value, []).append(index)
        return found

    def leaf(self, value: int) -> Leaf | None:
        """Return the leaf with that id, None if a call makes it."""
        return next((leaf for leaf in self.leaves if leaf.id == value), None)

    def site_of(self, call: Call) -> Site | None:
        """Return the source position of a call."""
        return self.sites[call.site] if 0 <= call.site < len(self.sites) else None

    def new_id(self) -> int:
        """Return an id that no value has yet."""
        used = [leaf.id for leaf in self.leaves] + [out for call in self.calls for out in call.outs if out is not None]
        return max(used, default=-1) + 1

    def slice(self, output: int | None = None) -> Program:
        """Return the smallest program that still makes `output` (by default its own output)."""
        target = self.output if output is None else output
        needed, kept = {target}, []
        for call in reversed(self.calls):
            if any(out in needed for out in call.outs):
                kept.append(call)
                needed.update(call.inputs())
        leaves = tuple(leaf for leaf in self.leaves if leaf.id in needed)
        calls = tuple(reversed(kept))
        used = sorted({call.site for call in calls if 0 <= call.site < len(self.sites)})
        renumbered = {old: new for new, old in enumerate(used)}
        return Program(
            leaves,
            tuple(replace(call, site=renumbered.get(call.site, -1)) for call in calls),
            target,
            tuple(self.sites[index] for index in used),
            self.computes,
        )

    def execute(
        self,
        leaves: Mapping[int, Tensor],
        *,
        dtype: torch.dtype | None = None,
        backward: bool = True,
        trace: bool = False,
        ends: bool = False,
    ) -> Run:
        """Run the program forward and, where the output carries a gradient, backward.

        leaves:   leaf id → tensor. They are not modified.
        dtype:    compute in this floating dtype instead of the recorded ones.
        trace:    also keep, for every call, the gradients that went into and out of its autograd node.
        ends:     keep only the leaves, the output and the leaves' gradients: a large batch is then held once, not once for every call.
        Raises ProgramError if an operator is unknown, a leaf is missing, or a call fails.
        """
        shelf = Shelf()
        values: dict[int, Tensor] = {}  # what a later call reads; the rest is put away
        away, grads, back = Shelved(shelf), Shelved(shelf), _Back(shelf)
        for leaf in self.leaves:
            if leaf.id not in leaves:
                raise ProgramError(f"the tensor of leaf {leaf.id} ({leaf.name}) is missing", slug="program-missing-leaf")
            tensor = leaves[leaf.id].detach()
            if dtype is not None and tensor.is_floating_point():
                tensor = tensor.to(dtype)
            if leaf.diff and backward and tensor.is_floating_point():
                tensor.requires_grad_()
                tensor.register_hook(partial(_keep, grads, leaf.id))  # type: ignore[no-untyped-call]
            values[leaf.id] = tensor

        last_uses = self._last_uses()
        device = next((tensor.device for tensor in values.values()), torch.device("cpu"))
        made = 0  # elements of all results so far
        with contextlib.ExitStack() as stack:
            for kind in {tensor.device.type for tensor in values.values()} | {"cpu"}:
                stack.enter_context(torch.autocast(kind, enabled=False))  # the recorded calls hold the casts already
            stack.enter_context(_saving(shelf, values.values()))
            for index, call in enumerate(self.calls):
                results, size = perform(call, values, dtype, device, call.grad and backward, MAX_ELEMENTS - made, index)
                made += size
                node = None
                for out, tensor in zip(call.outs, results, strict=False):
                    if out is None or not isinstance(tensor, Tensor):
                        continue
                    values[out] = tensor
                    if backward and tensor.requires_grad:
                        if not ends:
                            tensor.register_hook(partial(_keep, grads, out))  # type: ignore[no-untyped-call]
                        node = tensor.grad_fn
                if trace and node is not None:
                    node.register_hook(partial(back.keep, index))
                del results, node
                for value in last_uses.get(index, ()):
                    if value in values and not ends:
                        away[value] = values[value]
                    values.pop(value, None)
            if self.output not in values:
                raise ProgramError("the program does not make its output", slug="program-missing-value")
            output = values[self.output]
            kept = {value: tensor.detach() for value, tensor in values.items()}
            values.clear()
            if backward and output.requires_grad:
                try:
                    torch.autograd.backward([output], [torch.ones_like(output)])
                except RuntimeError as error:
                    raise ProgramError(f"backward failed: {str(error).splitlines()[0]}", slug="program-backward-failed") from error
        return Run(ChainMap(kept, away), grads, back, tuple(back.order))

    def _last_uses(self) -> dict[int, list[int]]:
        """Index of a call → results that nobody reads after it."""
        last = {
            value: index for index, call in enumerate(self.calls) for value in (*call.inputs(), *(o for o in call.outs if o is not None))
        }
        kept = {leaf.id for leaf in self.leaves} | {self.output}
        found: dict[int, list[int]] = {}
        for value, index in last.items():
            if value not in kept:
                found.setdefault(index, []).append(value)
        return found

    def to_json(self) -> dict[str, Any]:
        """Return the program as JSON data."""
        return {
            "leaves": [[leaf.id, leaf.name, leaf.origin, leaf.diff, leaf.made_by, leaf.role] for leaf in self.leaves],
            "calls": [
                [
                    call.op,
                    encode(call.args),
                    {name: encode(arg) for name, arg in call.kwargs},
                    list(call.outs),
                    call.site,
                    call.grad,
                    call.module,
                ]
                for call in self.calls
            ],
            "output": self.output,
            "computes": str(self.computes),
            "sites": [
                [s.file, s.line, s.function, s.column, s.end_line, s.end_column, s.name, s.within, s.expression, list(s.args), s.source]
                for s in self.sites
            ],
        }

    @staticmethod
    def from_json(data: Any) -> Program:
        """Return the program that `to_json` wrote.

        Raises ProgramError if the data is not one; operators are looked up only when the program runs.
        """
        try:
            leaves = tuple(Leaf(int(i), _text(n), str(o), bool(d), str(m), str(r)) for i, n, o, d, m, r in data["leaves"])
            calls = tuple(
                Call(
                    str(op),
                    cast("tuple[Arg, ...]", decode(args)),
                    tuple(sorted((str(name), decode(arg)) for name, arg in kwargs.items())),
                    tuple(None if out is None else int(out) for out in outs),
                    int(site),
                    bool(grad),
                    str(module),
                )
                for op, args, kwargs, outs, site, grad, module in data["calls"]
            )
            sites = tuple(
                Site(
                    str(file), int(line), str(function), int(column), int(end_line), int(end_column), _text(name), _text(within),
                    str(expression), tuple(str(arg) for arg in args), tuple((int(number), str(text)) for number, text in source),
                )
                for file, line, function, column, end_line, end_column, name, within, expression, args, source in data["sites"]
            )  # fmt: skip
            return Program(leaves, calls, int(data["output"]), sites, Computes(data.get("computes", "loss")))
        except (KeyError, TypeError, ValueError, AttributeError, IndexError, OverflowError, RecursionError) as error:
            raise ProgramError(f"the recorded program is not readable: {error}", slug="program-unreadable") from error


def _keep(grads: Shelved, value: int, grad: Tensor | None) -> None:
    if grad is not None:
        grads[value] = grad


class _Back(Mapping[int, tuple[Tensor | None, ...]]):
    """What the autograd node of each call returned; order: as backward visited them."""

    def __init__(self, shelf: Shelf) -> None:
        self._shelf = shelf
        self._held: dict[int, tuple[Tensor | Put | None, ...]] = {}
        self.order: list[int] = []

    def keep(self, index: int, returned: tuple[Tensor | None, ...], received: tuple[Tensor | None, ...]) -> None:
        """Hook of a call's node."""
        self._held[index] = tuple(None if grad is None else self._shelf.put(grad) for grad in returned)
        self.order.append(index)

    def __getitem__(self, index: int) -> tuple[Tensor | None, ...]:
        return tuple(None if held is None else took(held) for held in self._held[index])

    def __iter__(self) -> Iterator[int]:
        return iter(self._held)

    def __len__(self) -> int:
        return len(self._held)


def _saving(shelf: Shelf, leaves: Iterable[Tensor]) -> torch.autograd.graph.saved_tensors_hooks:
    """Put away what autograd saves for backward, except the leaves, which are in memory all the time."""
    held = {leaf.data_ptr() for leaf in leaves}
    return torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor if tensor.data_ptr() in held else shelf.put(tensor), took)


def _makes_floats(call: Call, args: list[Any]) -> bool:
    """Does a factory that names no dtype give the default one?"""
    name = base_name(call.op)
    if name == "full":
        return len(args) > 1 and isinstance(args[1], float)
    if name == "arange":
        return any(isinstance(arg, float) for arg in args)
    return name in ("ones", "zeros", "eye", "linspace", "logspace", "scalar_tensor")


def _text(value: Any) -> str | None:
    return None if value is None else str(value)


# What a call with arguments from a hostile file may raise.
_FAILURES = (RuntimeError, TypeError, ValueError, IndexError, ArithmeticError, AttributeError, AssertionError, MemoryError, RecursionError)


def _elements(call: Call, function: Any, args: list[Any], kwargs: dict[str, Any]) -> int:
    """Return how many elements a call will make, worked out without making them: a file must not be able to ask for all memory."""
    huge = any(isinstance(arg, (int, float)) and MAX_ELEMENTS < abs(arg) < math.inf for arg in args)
    if huge and base_name(call.op) in ("arange", "eye", "linspace", "logspace"):
        return MAX_ELEMENTS + 1  # torch itself overflows on such sizes
    if base_name(call.op) in _BY_CONTENT:
        return sum(tensor.numel() for tensor in _tensors(args))  # at most about what goes in
    if base_name(call.op) == "repeat_interleave":
        repeats = [arg for arg in args if isinstance(arg, Tensor) and not arg.is_floating_point()]
        if repeats:
            total: int = int(repeats[-1].sum())
            return total * max(1, int(args[0].numel()))
    result = function(*_on_meta(args), **{**{name: _on_meta(arg) for name, arg in kwargs.items()}, **_meta_device(function)})
    return sum(tensor.numel() for tensor in _tensors(result))


# The size of these results depends on the content of their arguments; nothing can be said without it.
_BY_CONTENT = frozenset(["_unique2", "bincount", "equal", "index", "masked_select", "nonzero", "unique_dim"])


def _meta_device(function: Any) -> dict[str, Any]:
    named = any(argument.name == "device" for argument in function._schema.arguments)
    return {"device": torch.device("meta")} if named else {}


def _on_meta(arg: Any) -> Any:
    if isinstance(arg, Tensor):
        return torch.empty_strided(arg.shape, arg.stride(), dtype=arg.dtype, device="meta")
    if isinstance(arg, list):
        return [_on_meta(item) for item in arg]
    return arg


def _tensors(tree: Any) -> Iterator[Tensor]:
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, (list, tuple)):
        for item in tree:
            yield from _tensors(item)


_NONFINITE = {"inf": math.inf, "-inf": -math.inf, "nan": math.nan}


def encode(arg: Arg) -> Any:
    """Return an argument as JSON data: {"v": id} for values, {"dtype": …} and the like for what JSON does not have."""
    if isinstance(arg, Ref):
        return {"v": arg.id}
    if isinstance(arg, (tuple, list)):
        return [encode(item) for item in arg]
    if isinstance(arg, float) and not math.isfinite(arg):
        return {"float": str(arg)}
    if arg is None or isinstance(arg, (bool, int, float, str)):
        return arg
    kind = type(arg).__name__  # dtype, device, memory_format, layout
    return {kind: str(arg).removeprefix("torch.")}


DEEPEST = 8  # lists within lists of one argument; aten takes lists of tensors, and no deeper ones


def decode(data: Any, depth: int = 0) -> Arg:
    """Return the argument that `encode` wrote. depth: of the lists that it stands in."""
    if depth > DEEPEST:
        raise ValueError("an argument is nested too deeply")
    if isinstance(data, list):
        return tuple(decode(item, depth + 1) for item in data)
    if not isinstance(data, dict):
        if data is None or isinstance(data, (bool, int, float, str)):
            return data
        raise ValueError(f"cannot read the argument {data!r}")
    ((kind, text),) = data.items()
    if kind == "v":
        return Ref(int(text))
    if kind == "float":
        return _NONFINITE[text]
    if kind == "device":
        return torch.device("cpu")
    found = getattr(torch, text, None) if isinstance(text, str) and text.isidentifier() else None
    if kind in ("dtype", "memory_format", "layout") and isinstance(found, (torch.dtype, torch.memory_format, torch.layout)):
        return found
    raise ValueError(f"cannot read the argument {data!r}")


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Are two tensors the same, bit by bit (a NaN equals itself)?"""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    same = (a == b) | (torch.isnan(a) & torch.isnan(b)) if a.is_floating_point() else a == b
    return bool(same.all())


def join(programs: Iterable[Program]) -> Program:
    """Return one program that does what the given ones do, in order; ids must already agree, sites are merged."""
    leaves: dict[int, Leaf] = {}
    calls: list[Call] = []
    sites: list[Site] = []
    made: set[int] = set()
    output = -1
    for program in programs:
        offset = len(sites)
        sites.extend(program.sites)
        for call in program.calls:
            calls.append(replace(call, site=call.site + offset if call.site >= 0 else -1))
            made.update(out for out in call.outs if out is not None)
        leaves.update({leaf.id: leaf for leaf in program.leaves})
        output = program.output
    return Program(tuple(leaf for leaf in leaves.values() if leaf.id not in made), tuple(calls), output, tuple(sites))
