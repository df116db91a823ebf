"""What a call of a file may take, worked out before it runs: a small file must not ask for much memory, or for much time.

    allowance = Allowance.of(leaves, calls=31)
    allowance.charge(3, "aten.tile.default", cost(function, args, kwargs, allowance.most))      ProgramError: program-too-large

The unit is an element that is read or written. Where the shapes of the results are not plain (`shapes`), a call is run on tensors without
content first, under a mode that sees what an operator is made of, and counts what goes in and comes out. What an operator does beyond
that, inside, stands in `_INSIDE`, and what depends on content in `_BY_CONTENT`. The count holds for the time of a call as for its memory:
`tests/fuzz/operators.py` measures both.

What is allowed grows with the tensors of the file: recorded steps take at most 7 times their elements in one call, and 4 times on average.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from nanscope.errors import ProgramError
from nanscope.program.ops import ATTENTIONS, CHOICES, FACTORISED, RANGES, SPREADS, Flow, base_name, flow_of
from nanscope.program.safety import bound
from nanscope.program.shapes import shapes_of
from nanscope.program.summary import broadcasts
from nanscope.torch_inside import Mode, schema_of

SMALL = 1 << 23  # elements that a call may take whatever the file holds: the mask of a sequence of 2,896 tokens
SHARE = 32  # times the elements of the file's tensors, for one call
CALLS = 8  # calls of that size which any program may make
EACH = 8  # times the elements of the file's tensors, on an average call
PIECE = 64  # elements that a tensor takes even if it has none
LARGE_FILES = "NANSCOPE_LARGE_FILES"  # set to 1 by somebody who knows where a file comes from


def may_be_large() -> bool:
    """Did a person say that files may ask for more than a stranger's?"""
    return os.environ.get(LARGE_FILES) == "1"


def _machine() -> int:
    """Elements of eight bytes that this machine can hold."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 8


@dataclass(slots=True)
class Allowance:
    """What a program may still take. most: elements of one call. left: elements of all calls to come. room: elements of their results."""

    most: int
    left: int
    room: int
    own: int

    @staticmethod
    def of(leaves: Iterable[Tensor], calls: int) -> Allowance:
        own = sum(min(_elements(tensor), tensor.untyped_storage().nbytes() // tensor.element_size()) for tensor in leaves)
        if may_be_large():
            return Allowance(1 << 62, 1 << 62, 1 << 62, own)
        machine = _machine()
        return Allowance(min(SMALL + SHARE * own, machine // 4), CALLS * SMALL + EACH * calls * own, machine, own)

    def charge(self, index: int, op: str, taken: Toll) -> None:
        """Take what a call takes off the allowance; ProgramError if that is too much."""
        self.left -= taken.touched
        self.room -= taken.made
        if taken.touched > self.most or self.left < 0 or self.room < 0:
            raise ProgramError(
                f"call {index} ({op}) takes the program beyond what a file with {self.own:,} elements may ask for; "
                f"if you know where it comes from, set {LARGE_FILES}=1",
                slug="program-too-large",
            )


@dataclass(frozen=True, slots=True)
class Toll:
    """Elements that a call reads and writes, and those of its results alone."""

    touched: int
    made: int = 0


def cost(function: Any, args: list[Any], kwargs: Mapping[str, Any], most: int) -> Toll:
    """Return what a call will take, without doing it. most: what it may take; work on the estimate itself ends there.

    Raises what torch raises where the arguments do not fit together.
    """
    name, given = base_name(str(function)), bound(function, args, kwargs)
    reads = sum(_elements(tensor) for tensor in tensors_in(list(given.values())))
    before = reads + _BEFORE.get(name, _nothing)(given)
    if before > most:
        return Toll(before)
    if name in RANGES and any(isinstance(arg, (int, float)) and most < abs(arg) < math.inf for arg in given.values()):
        return Toll(1 << 62)  # torch itself overflows on such sizes
    content = _BY_CONTENT.get(name, _nothing)(given)
    if content:
        return Toll(reads + content, content)
    plain = shapes_of(name, given)
    if plain is not None:
        made = sum(map(math.prod, plain))
        inside = _INSIDE[name](given, torch.empty(plain[0], device="meta")) if name in _INSIDE else 0
        return Toll(max(reads + made + PIECE * len(plain) + inside, before + made), made)
    settled = _SETTLED.get(name, _as_it_is)(given)
    toll = _counted_once(function, tuple((key, _without_content(arg)) for key, arg in settled.items()), most)
    return replace(toll, touched=max(toll.touched, before + toll.made))


def without_content(function: Any, args: list[Any], kwargs: Mapping[str, Any]) -> Any:
    """Return what a call makes of tensors on the meta device. What is plain is not asked of torch, which would load its compiler for it.

    Raises what torch raises where the arguments do not fit together.
    """
    tensors = [*tensors_in(args), *tensors_in(list(kwargs.values()))]
    name = base_name(str(function))
    flow = Flow.POINTWISE if name in CHOICES else flow_of(name)
    plain = shapes_of(name, bound(function, args, kwargs)) if flow in _AS_TOLD else None
    together = plain is not None and (flow is Flow.REDUCE or all(broadcasts(tensor.shape, plain[0]) for tensor in tensors))
    if plain is None or len(plain) > 1 or not together or not all(map(_is_in_order, tensors)):
        return function(*args, **kwargs)
    few = 2 if name in SPREADS else 1  # of one element torch warns
    made = function(*_of_few(args, few), **{key: _of_few(arg, few) for key, arg in kwargs.items()})
    return torch.empty(plain[0], dtype=made.dtype, device="meta")


_AS_TOLD = (Flow.POINTWISE, Flow.REDUCE)  # of these, what is made of tensors in order is contiguous


def _is_in_order(tensor: Tensor) -> bool:
    """Do its dimensions stand in memory from the outermost to the innermost? Those of what is made of it element by element do, then."""
    strides = [stride for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1 and stride]
    return all(outer > inner for outer, inner in pairwise(strides))


def _of_few(arg: Any, few: int) -> Any:
    """The same arguments with so many elements along each dimension: of which dtype the result is hangs on nothing else."""
    if isinstance(arg, Tensor):
        return torch.ones((few,) * arg.dim(), dtype=arg.dtype)
    return [_of_few(item, few) for item in arg] if isinstance(arg, (list, tuple)) else arg


def hangs_on_content(name: str) -> bool:
    """May a call of this operator take more with other numbers of the same shapes?"""
    return name in _BY_CONTENT


@lru_cache(maxsize=4096)  # a step is run dozens of times, with an edit here and there
def _counted_once(function: Any, given: tuple[tuple[str, Any], ...], most: int) -> Toll:
    counting = _Counting(most)
    shown = {key: _on_meta(arg) for key, arg in given}
    try:
        with counting:
            result = function(**{**shown, **_meta_device(function)})
    except ProgramError:
        return Toll(counting.touched)
    return Toll(counting.touched, sum(_elements(tensor) for tensor in tensors_in(result)))


class _Counting(Mode):
    """Counts what calls read and write; one that is made of others is seen as those."""

    def __init__(self, most: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.most, self.touched = most, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = bound(func, list(args), kwargs or {})
        result = func(*args, **(kwargs or {}))
        reads = sum(_elements(tensor) for tensor in tensors_in(list(given.values())))
        made = sum(_elements(tensor) + PIECE for tensor in tensors_in(result))
        self.touched += reads + made + _INSIDE.get(base_name(str(func)), _no_more)(given, result)
        if self.touched > self.most:
            raise ProgramError("more than it may take", slug="program-too-large")
        return result


def tensors_in(tree: Any) -> Iterator[Tensor]:
    """Yield the tensors in nested lists."""
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, (list, tuple)):
        for item in tree:
            yield from tensors_in(item)


def _elements(tensor: Any) -> int:
    """As torch counts them, but of an expanded tensor, too, where its own count overflows."""
    return math.prod(tensor.shape) if isinstance(tensor, Tensor) else 0


def _meta_device(function: Any) -> dict[str, Any]:
    named = any(argument.name == "device" for argument in schema_of(function).arguments)
    return {"device": torch.device("meta")} if named else {}


@dataclass(frozen=True, slots=True)
class _Laid:
    """How a tensor lies in memory."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


def _without_content(arg: Any) -> Any:
    if isinstance(arg, Tensor):
        return _Laid(tuple(arg.shape), arg.stride(), arg.dtype)
    return tuple(_without_content(item) for item in arg) if isinstance(arg, list) else arg


def _on_meta(arg: Any) -> Any:
    if isinstance(arg, _Laid):
        return torch.empty_strided(arg.shape, arg.stride, dtype=arg.dtype, device="meta")
    return [_on_meta(item) for item in arg] if isinstance(arg, tuple) else arg


# -- what is known before anything runs: the parts that a tensor is cut into, and loops ----------------------------------------------------


_Given = Mapping[str, Any]


def _nothing(given: _Given) -> int:
    return 0


def _length(given: _Given) -> int:
    """The size of the first argument along the dimension that a call names."""
    tensor, dim = given["self"], given.get("dim", 0)
    return int(tensor.shape[dim])


def _guarded(known: Callable[[_Given], int]) -> Callable[[_Given], int]:
    """Arguments that do not fit are for torch to refuse."""

    def count(given: _Given) -> int:
        try:
            return max(0, known(given))
        except (KeyError, IndexError, TypeError, ValueError, AttributeError, ZeroDivisionError):
            return 0

    return count


def _reads(factor: int) -> Callable[[_Given], int]:
    return lambda given: factor * _elements(given.get("self"))


_BEFORE: dict[str, Callable[[_Given], int]] = {
    name: _guarded(known)
    for names, known in (
        ("unbind", lambda given: PIECE * _length(given)),
        ("split unsafe_split", lambda given: PIECE * -(-_length(given) // given["split_size"])),
        ("chunk unsafe_chunk", lambda given: PIECE * (min(given["chunks"], _length(given)) if _length(given) else given["chunks"])),
        ("mvlgamma", lambda given: 3 * given["p"] * (1 + _elements(given["self"]))),
        ("roll", lambda given: len(given["shifts"]) * _elements(given["self"])),
        ("polygamma", _reads(16)),
        ("argsort median msort nanmedian sort topk", _reads(4)),
    )
    for name in names.split()
}


# -- what depends on the content -----------------------------------------------------------------------------------------------------------


def _together(given: _Given) -> int:
    shape: torch.Size = torch.broadcast_shapes(given["self"].shape, given["mask"].shape)  # type: ignore[no-untyped-call]
    return math.prod(shape)


def _counted(given: _Given) -> int:
    tensor, least = given["self"], int(given.get("minlength", 0))
    return least + 1 + (int(tensor.max()) + 1 + _elements(tensor) if tensor.numel() else 0)


def _indices(tensor: Tensor) -> int:
    return (tensor.dim() + 1) * _elements(tensor)


# elements of the results, at most; 0 where the content does not say
_BY_CONTENT: dict[str, Callable[[_Given], int]] = {
    "_unique2": _guarded(_reads(8)),
    "unique_dim": _guarded(_reads(16)),
    "bincount": _guarded(_counted),
    "equal": _guarded(lambda given: 1),
    "masked_select": _guarded(_together),
    "nonzero": _guarded(lambda given: 1 + _indices(given["self"])),
    "where": _guarded(lambda given: 0 if "self" in given else 1 + _indices(given["condition"])),
}


def _as_it_is(given: _Given) -> _Given:
    return given


def _without_masks(given: _Given) -> _Given:
    """A mask is as many indices as it has true elements."""
    found: list[Tensor | None] = []
    indices = given.get("indices")
    for index in indices if isinstance(indices, list) else []:
        if isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8):
            found += [torch.empty(int(index.count_nonzero()), dtype=torch.int64, device="meta")] * index.dim()
        else:
            found.append(index)
    return {**given, "indices": found} if found else given


def _repeated(given: _Given) -> _Given:
    repeats, tensor = given.get("repeats"), given.get("self")
    if not isinstance(repeats, Tensor) or repeats.is_floating_point() or repeats.is_complex():
        return given
    total = int(repeats.sum())
    if isinstance(tensor, Tensor) and repeats.numel() == 1:
        dim = given.get("dim")
        total *= _elements(tensor) if dim is None else tensor.shape[dim]
    return {**given, "output_size": total}


def _classes(given: _Given) -> _Given:
    tensor, classes = given.get("self"), given.get("num_classes", -1)
    return {**given, "num_classes": int(tensor.max()) + 1} if classes == -1 and isinstance(tensor, Tensor) and tensor.numel() else given


# the same call with its content in its arguments, so that it can be run without any
_SETTLED: dict[str, Callable[[_Given], _Given]] = {
    "index": _without_masks,
    "_unsafe_index": _without_masks,
    "index_put": _without_masks,
    "_unsafe_index_put": _without_masks,
    "repeat_interleave": _repeated,
    "one_hot": _classes,
}


# -- what an operator does inside ----------------------------------------------------------------------------------------------------------


def _no_more(given: _Given, result: Any) -> int:
    return 0


FAST = 64  # multiplications and additions of a matrix product that take as long as one element


def _product(first: str) -> Callable[[_Given, Any], int]:
    return lambda given, result: int(given[first].shape[-1]) * _elements(result) // FAST


def _convolved(given: _Given, result: Any) -> int:
    """The products, the columns that they are taken from, and the padding."""
    tensor, weight = given["input"], given["weight"]
    kernel, transposed = _elements(weight) // max(1, weight.shape[0]), bool(given["transposed"])
    places = _elements(tensor) // max(1, tensor.shape[1]) if transposed else _elements(result) // max(1, weight.shape[0])
    columns = places * kernel * (1 if transposed else int(given["groups"]))
    products = (_elements(tensor) if transposed else _elements(result)) * kernel
    padding = [*given["padding"], *[given["padding"][-1]] * tensor.dim()]
    padded = tensor.shape[0] * tensor.shape[1] * math.prod(n + 2 * p for n, p in zip(tensor.shape[2:], padding, strict=False))
    return int(columns + products // FAST + padded)


def _pooled(given: _Given, result: Any) -> int:
    kernel = given["kernel_size"]
    kernel = kernel if isinstance(kernel, list) else [kernel]
    return _elements(result) * math.prod(int(n) for n in (kernel if len(kernel) > 1 else [*kernel, *kernel]))


def _decomposed(given: _Given, result: Any) -> int:
    matrix = next(tensor for tensor in tensors_in(list(given.values())))
    return _elements(matrix) * max(matrix.shape[-2:], default=1) // 8


def _attended(given: _Given, result: Any) -> int:
    """The scores, and the two products, as the formula makes them."""
    query, key = given["query"], given["key"]
    scores: int = _elements(query) // max(1, query.shape[-1]) * int(key.shape[-2])
    return scores * 4 + scores * int(query.shape[-1]) * 2 // FAST


def _placed(given: _Given, result: Any) -> int:
    """As many elements as the indices name, each perhaps many times."""
    return _elements(torch.ops.aten.index.Tensor(given["self"], given["indices"]))


_INSIDE: dict[str, Callable[[_Given, Any], int]] = {
    "mm": _product("self"),
    "bmm": _product("self"),
    "addmm": _product("mat1"),
    "baddbmm": _product("batch1"),
    "convolution": _convolved,
    "avg_pool2d": _pooled,
    "_cdist_forward": lambda given, result: _elements(result) * int(given["x1"].shape[-1]),
    **dict.fromkeys(FACTORISED, _decomposed),
    **dict.fromkeys(ATTENTIONS, _attended),
    "index_put": _placed,
    "_unsafe_index_put": _placed,
}
