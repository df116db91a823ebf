"""The loss as a program: the aten calls between the model's outputs and the scalar, as data.

    Leaf(id=0, name='per_token_logps', …)                       what comes in, by reference to a tensor
    Call('aten.sub.Tensor', (Ref(0), Ref(1)), out=(2,), site=0)
    Call('aten.exp.default', (Ref(2),), out=(3,), site=1)

A program is pure: every call makes new values, every value has one id, nothing is overwritten (in-place operators are recorded in
their functional form). So a slice is a walk, an edit is an insertion, and a run is a loop. In a file it is JSON: operator names from a
whitelist, arguments, positions in the source. There is no code in it.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from typing import Any, TypeAlias, Union

import torch

from nanscope.errors import ProgramError
from nanscope.program.ops import COPIES, DATA_FACTORIES, FLOW, NOT_AGAIN, SILENT, UNDECLARED_WRITES, base_name, carries
from nanscope.torch_inside import has_kernel, schema_of


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
    source: the lines of the statement with a few around it, as (line number, text). other: numbers of those whose bytes in the file are not
    this text in UTF-8 and one line feed, so that no patch can quote them.
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
    other: tuple[int, ...] = ()


class Computes(StrEnum):
    """What a program ends in: the loss, a gradient as the trainer changed it after backward, a weight after the optimizer's update, or a
    value inside the model."""

    LOSS = "loss"
    GRADIENT = "gradient"
    UPDATE = "update"
    ACTIVATION = "activation"


NAMELESS = "parameter"  # the name of a weight that is in no module that was called


@dataclass(frozen=True, slots=True)
class Leaf:
    """A tensor that comes into the program from outside.

    origin: "data" (batch, constant), "module" (output of a module), "parameter", "buffer", or "opaque" (made by a call that cannot be
    replayed). made_by: the module's class and path, or the operator. diff: a gradient flows back through it. role: what it means, where
    what told so has been cut off. site: where memory was made that nobody has written to, an index into the program's sites, else -1.
    """

    id: int
    name: str | None
    origin: str
    diff: bool
    made_by: str = ""
    role: str = ""
    site: int = -1

    @property
    def is_of_model(self) -> bool:
        """Is it what a model holds?"""
        return self.origin in ("parameter", "buffer")


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

    @property
    def name(self) -> str:
        """The bare name of the operator: `exp` of `aten.exp.default`."""
        return base_name(self.op)

    def inputs(self) -> Iterator[int]:
        """Yield the ids of the values that the call reads, in order of its arguments."""
        for arg in self.args:  # not by way of `refs`: every walk asks this of every call
            if isinstance(arg, Ref):
                yield arg.id
            elif isinstance(arg, tuple):
                yield from refs(arg)
        for _, arg in self.kwargs:
            yield from refs(arg)


_TURNED = {"rsub": "rsub(", "reciprocal": "reciprocal("}  # what torch makes of `number - x` and `number / x`, and how else it is asked for
_LITERAL = re.compile(r"""[-+(]*[\d.][\w.+)-]*|["'].*|None|True|False""")


def words_of(call: Call, site: Site) -> tuple[str, ...]:
    """Return the texts of a call's arguments in the order in which it receives them."""
    return words_for(call.name, site)


def words_for(name: str, site: Site) -> tuple[str, ...]:
    """Return the texts of a call's arguments in the order in which it receives them: of `alpha / x`, with a number alpha, x comes first.
    name: of its operator.

    Nothing of a call that is a part of what a function of torch computes: in `F.kl_div(p, q)` the product is none of p and q.
    """
    if is_within(site, name):
        return ()
    turned = name in _TURNED and len(site.args) == 2 and _TURNED[name] not in site.expression
    return site.args[::-1] if turned and not _LITERAL.fullmatch(site.args[1]) else site.args


_NO_NUMBER = re.compile(r"""-?(float\(['"][-+]?(nan|inf|infinity)['"]\)|(math|torch|np|numpy)\.(nan|inf))""", re.IGNORECASE)


def writes_no_number(site: Site) -> bool:
    """Does the code write NaN or an infinity there, as `float("nan")`, and not compute it?"""
    return any(_NO_NUMBER.fullmatch(word) for word in site.args)


_DECORATION = re.compile(r"^_+|^(native|linalg|special|scaled_dot_product)_|_(forward|interface)$|_$")
_ALIKE = {
    "_log_softmax": ("cross_entropy",),
    "log_softmax": ("cross_entropy",),
    "rsub": ("sub", "subtract"),
    "pow": ("square", "float_power"),
    "div": ("divide", "true_divide"),
    "mul": ("multiply",),
    "clamp_min": ("clip", "clamp"),
    "clamp_max": ("clip", "clamp"),
    "maximum": ("max",),
    "minimum": ("min",),
}


def moved_words(name: str, site: Site) -> tuple[str, ...]:
    """Return what the code calls the arguments there, nothing where a call only moves what one of several became on its way."""
    return () if carries(name) and is_within(site, name) else site.args


def is_within(site: Site, name: str) -> bool:
    """Is a call made by what the code calls there, a function of torch's that is another one, or a module? name: of the call's operator.

    A copy has its argument from there all the same, and so has what only moves elements, where there is one.
    """
    if name in COPIES or not _is_within(site.expression, name):
        return False
    return not carries(name) or sum(not _LITERAL.fullmatch(word) for word in site.args) > 1


@lru_cache(maxsize=4096)
def _is_within(expression: str, name: str) -> bool:
    try:
        node = ast.parse(expression.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    if not isinstance(node, ast.Call):
        return False
    function = node.func.attr if isinstance(node.func, ast.Attribute) else node.func.id if isinstance(node.func, ast.Name) else ""
    own, called = _DECORATION.sub("", name), _DECORATION.sub("", function)
    return bool(called) and own not in called and called not in own and function not in _ALIKE.get(name, ())


def refs(arg: Arg) -> Iterator[int]:
    """Yield the ids inside an argument."""
    if isinstance(arg, Ref):
        yield arg.id
    elif isinstance(arg, tuple):
        for item in arg:
            if isinstance(item, Ref):
                yield item.id
            elif isinstance(item, tuple):
                yield from refs(item)


def substitute(arg: Arg, mapping: Mapping[int, int]) -> Arg:
    """Return the argument with ids replaced."""
    if isinstance(arg, Ref):
        return Ref(mapping.get(arg.id, arg.id))
    if isinstance(arg, tuple):
        return tuple(substitute(item, mapping) for item in arg)
    return arg


@lru_cache(maxsize=1024)
def overload(op: str) -> Any:
    """Return the aten overload named `op` ("aten.exp.default").

    Raises ProgramError for anything outside the whitelist, so a name from a file can never reach other code.
    """
    if base_name(op) not in FLOW:
        raise ProgramError(f"operator {op!r} is not in the whitelist of replayable operators", slug="program-unknown-op")
    found = _functional(op)
    if found is None:
        raise ProgramError(f"operator {op!r} does not exist in torch {torch.__version__} or is not functional", slug="program-unknown-op")
    return found


@lru_cache(maxsize=1024)
def recorded(op: str) -> Any:
    """Return the aten overload of a call that this process has made itself; one whose name comes from a file is asked of `overload`.

    Raises ProgramError for what does not give the same again.
    """
    found = _functional(op)
    if found is None or not runs_again(found):
        raise ProgramError(f"operator {op!r} does not give the same again", slug="program-unknown-op")
    return found


def _functional(op: str) -> Any | None:
    match = re.fullmatch(r"aten\.([a-z_0-9]+)\.([A-Za-z_0-9]+)", op)
    packet = getattr(torch.ops.aten, match[1], None) if match else None
    found = getattr(packet, match[2], None) if match and packet is not None and match[2] in packet.overloads() else None
    # a packet holds functions of TorchScript, too, on numbers, strings and lists; the dispatcher does not know them, and they check nothing
    return None if found is None or schema_of(found).is_mutable or not has_kernel(found.name()) else found


def runs_again(function: Any) -> bool:
    """Does a call of aten, though no file may hold it, give the same again? Not what is random, or makes memory without content."""
    schema, name = schema_of(function), base_name(str(function))
    functional = str(function).startswith("aten.") and not schema.is_mutable and bool(schema.returns)
    other = name in DATA_FACTORIES | SILENT or name.startswith(NOT_AGAIN) or UNDECLARED_WRITES in name
    return functional and not other and torch.Tag.nondeterministic_seeded not in function.tags
