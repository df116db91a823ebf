"""Following a model call by call: a second look at models that are too large or too opaque to be recorded as a program.

The module runs once more on the inputs it had. After every call it is noted of which kind of non-finite values the result has any; from
the bad output one walks back, call by call, to the one that made them out of finite operands. Custom autograd functions, fused kernels
and out= buffers are no obstacle, since nothing has to be replayed: who wrote a piece of memory last is who made what is in it. For a
gradient the same is done with a hook on every node of the graph: gradient in finite, gradient out not.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from types import CodeType, FrameType
from typing import Any

import torch
from torch import Tensor

from nanscope.capture.custom import Backward, backward_of, is_custom, seen
from nanscope.capture.modules import Address, tensors_in
from nanscope.capture.seal import writes_of
from nanscope.capture.sites import NOWHERE, Author, Place, above_handler, author_of
from nanscope.capture.source import site_of
from nanscope.program.calls import Arg, Call, Computes, Leaf, Ref, Site, moved_words
from nanscope.program.local import is_plain, local, memory_of
from nanscope.program.numbers import at
from nanscope.program.ops import (
    BATCH_NORMS,
    FLOW,
    IN_TRAINING,
    MASK_FREE,
    OVERWRITES,
    RUNNING_STATISTICS,
    UNWRITTEN_FACTORIES,
    Flow,
    base_name,
    not_read,
)
from nanscope.program.program import Program
from nanscope.text import unravel
from nanscope.torch_inside import Mode, number_of, sequence_number

KEPT = 64 << 20  # bytes of operands that are kept of calls that made something non-finite


@dataclass(frozen=True, slots=True)
class Kinds:
    """Which non-finite values a tensor holds any of."""

    nan: bool = False
    posinf: bool = False
    neginf: bool = False

    def __bool__(self) -> bool:
        return self.nan or self.posinf or self.neginf


FINE = Kinds()


def kinds_of(tensor: Tensor) -> Kinds:
    """Return what non-finite values a tensor holds."""
    values = local(tensor)
    if values is None or not values.is_floating_point() or not values.numel():
        return FINE
    values = values.float() if values.dtype.itemsize == 1 else values
    low, high = torch.aminmax(values)
    if bool(torch.isfinite(low) & torch.isfinite(high)):
        return FINE
    return Kinds(bool(torch.isnan(low) | torch.isnan(high)), bool((values == torch.inf).any()), bool((values == -torch.inf).any()))


@dataclass(slots=True)
class Mark:
    """One call that was followed.

    reads:     numbers of earlier marks, or -1 for what came from outside. outside: kinds of the latter; foreign: one of them that is bad.
    operands:  its arguments, kept where it seems to have made something non-finite.
    unwritten: its result is memory with nothing in it yet.
    number:    of autograd nodes that were made before it returned.
    """

    op: str
    overload: str
    reads: tuple[int, ...]
    outside: Kinds
    kinds: Kinds
    code: CodeType | None
    lasti: int
    module: str
    operands: tuple[Any, ...] | None = None
    kwargs: dict[str, Any] | None = None
    result: Tensor | None = None
    position: int = 0
    unwritten: bool = False
    foreign: Tensor | None = None
    number: int = 0


@dataclass(frozen=True, slots=True)
class Made:
    """The call that made the harm: a program of this one call where it can be replayed, else what was seen of it.

    flat: the first harmful element of its result. foreign: nothing was made, `result` came in from outside. operands: what is known to be
    to blame, where no program says it.
    """

    program: Program | None
    tensors: dict[int, Tensor]
    op: str
    site: Site | None
    module: str
    result: Tensor
    flat: int
    foreign: bool = False
    operands: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True, slots=True)
class LeftBehind:
    """What a call of forward made bad and its backward met again. dropped: forward went on without it, since its gradient is 0."""

    made: Made
    dropped: bool


class Follower(Mode):
    """Follows the calls of one run of a module."""

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.marks: list[Mark] = []
        self.end: tuple[CodeType | None, Place] = (None, NOWHERE)  # see `Callers`
        self.current_module = ""  # set by whoever knows in which part of the model a call is made
        self.spans: list[tuple[int, int, str]] = []  # numbers of the autograd nodes that each part of the model made
        self._writer: dict[Address, int] = {}
        self._addresses: dict[int, set[Address]] = {}  # address of a storage → the tensors in it
        self._kept = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        written, untouched = writes_of(func, args, kwargs)
        untouched |= {id(args[position]) for position in not_read(_name_of(func), args)}
        read = _parts(tensor for tensor in tensors_in([args, kwargs]) if id(tensor) not in untouched)
        foreign = [tensor for tensor, part in read if _address(part) not in self._writer]
        before = [kinds_of(tensor) for tensor in foreign]
        bad = next((tensor for tensor, kinds in zip(foreign, before, strict=True) if kinds), None)
        sources = tuple(self._writer.get(_address(part), -1) for _, part in read)
        result = func(*args, **kwargs)
        outs, written = ([part for _, part in _parts(tensors_in([tree]))] for tree in (result, written))
        self._note(func, args, kwargs, sources, before, bad, [*outs, *written], bool(written))
        return result

    def _note(
        self,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        sources: tuple[int, ...],
        before: Sequence[Kinds],
        foreign: Tensor | None,
        outs: Sequence[Tensor],
        writes: bool,
    ) -> None:
        name = _name_of(func)
        outside = _union(before)
        came = _union([outside, *(self.marks[number].kinds for number in sources if number >= 0)])
        code, lasti = self._caller()
        for position, tensor in enumerate(outs):
            unwritten = name.startswith(tuple(UNWRITTEN_FACTORIES)) or (
                FLOW.get(name) is Flow.MOVE and len(sources) == 1 and sources[0] >= 0 and self.marks[sources[0]].unwritten
            )
            kinds = FINE if unwritten else kinds_of(tensor)
            mark = Mark(name, str(func), sources, outside, kinds, code, lasti, self.current_module, position=position, unwritten=unwritten)
            mark.foreign, mark.number = foreign, sequence_number()
            if _makes(kinds, came) and FLOW.get(name) not in (Flow.MOVE, Flow.CREATE) and name not in OVERWRITES:
                size = sum(t.numel() * t.element_size() for t in tensors_in([args, kwargs, tensor]))
                if self._kept + size <= KEPT:
                    self._kept += size
                    mark.result = tensor.detach().clone() if writes else tensor.detach()
                    if not writes:
                        mark.operands, mark.kwargs = args, kwargs
            self.marks.append(mark)
            self._writes(tensor, len(self.marks) - 1, writes)

    def _caller(self) -> Place:
        frame: FrameType | None = sys._getframe(3)
        while frame is not None:
            author = author_of(frame.f_code)
            if author is Author.RELAY and (issuer := above_handler(frame)) is not None:
                frame = issuer
                continue
            if author:
                return frame.f_code, frame.f_lasti
            if frame.f_code is self.end[0]:
                return self.end[1]
            frame = frame.f_back
        return NOWHERE

    def _writes(self, tensor: Tensor, number: int, in_place: bool) -> None:
        address, storage = _address(tensor), memory_of(tensor)
        if in_place and storage:  # whoever shares the memory holds a part of what was written, beside what was there before
            for other in self._addresses.get(storage, ()):
                if other != address and other in self._writer:
                    old = self.marks[self._writer[other]]
                    both = _union([old.kinds, self.marks[number].kinds])
                    self.marks.append(Mark("alias", "", (number, self._writer[other]), FINE, both, None, -1, self.current_module))
                    self._writer[other] = len(self.marks) - 1
        self._writer[address] = number
        self._addresses.setdefault(storage, set()).add(address)

    def made(self, bad: Tensor) -> Made | None:
        """Walk from a bad tensor back to the call that made the harm; None if it was not made in this run or not kept."""
        return self._made(self._writer.get(_address(bad), -1), kinds_of(bad))

    def _made(self, number: int, kinds: Kinds) -> Made | None:
        seen: set[int] = set()
        while number >= 0 and number not in seen:
            seen.add(number)
            mark = self.marks[number]
            kinds = mark.kinds or kinds
            following = self._towards(mark, kinds)
            if following is None:
                return self._describe(mark, kinds)
            if following < 0 and mark.foreign is not None:
                site = None if mark.code is None else site_of(mark.code, mark.lasti)
                return Made(None, {}, "input", site, mark.module, mark.foreign, _first(mark.foreign, kinds_of(mark.foreign)), True)
            number = following
        return None

    def _towards(self, mark: Mark, kinds: Kinds) -> int | None:
        """The operand that the harm came from, -1 if it is one from outside, None if the call made it."""
        wanted: list[Callable[[Kinds], bool]] = [lambda k: k.nan] if kinds.nan else []
        wanted.append(lambda k: k.posinf)
        if not kinds.nan or mark.op in MASK_FREE:  # of a NaN an -inf is no cause but a mask: then the call made it
            wanted.append(lambda k: k.neginf)
        elif not any(fits(self.marks[number].kinds) for fits in wanted for number in mark.reads if number >= 0):
            negative = (number for number in mark.reads if number >= 0 and self._came_of_infinity(self.marks[number]))
            if not any(fits(mark.outside) for fits in wanted) and (number := next(negative, None)) is not None:
                return number  # it is +inf with the sign turned
        for fits in wanted:
            for number in mark.reads:
                if number >= 0 and fits(self.marks[number].kinds):
                    return number
            if fits(mark.outside):
                return -1
        return None

    def _came_of_infinity(self, mark: Mark) -> bool:
        return mark.kinds.neginf and (mark.outside.posinf or any(self.marks[read].kinds.posinf for read in mark.reads if read >= 0))

    def left(self, found: MadeBackward) -> LeftBehind | None:
        """Return what a node's forward call had made bad, if the bad gradient is of the same element; None if there is no such thing."""
        if found.function is not None:
            return self._saved(found.function)
        number = next((number for number, mark in enumerate(self.marks) if mark.number == found.number + 1), -1)
        made = self._made(number, self.marks[number].kinds) if number >= 0 and self.marks[number].kinds else None
        if made is None or made.foreign or made.result.shape != found.gradient.shape:
            return None
        both = ~(torch.isfinite(made.result) | torch.isfinite(found.gradient)).flatten()
        flat = int(both.int().argmax())
        dropped = found.received is not None and float(found.received.flatten()[flat]) == 0
        return LeftBehind(replace(made, flat=flat), dropped) if bool(both[flat]) else None

    def _saved(self, function: Backward) -> LeftBehind | None:
        """What the forward of a custom function made bad, and saved."""
        saved = next((tensor for tensor in function.saved if tensor is not None and kinds_of(tensor)), None)
        made = self.made(saved) if saved is not None else None
        return None if made is None or made.foreign else LeftBehind(made, False)

    def site_of(self, node: int) -> Site | None:
        """Return where the call was made that an autograd node belongs to. node: its number."""
        mark = next((mark for mark in self.marks if mark.number == node + 1), None)
        return None if mark is None or mark.code is None else site_of(mark.code, mark.lasti)

    def _describe(self, mark: Mark, kinds: Kinds) -> Made | None:
        if mark.result is None:
            return None
        flat = _first(mark.result, kinds)
        site = None if mark.code is None else site_of(mark.code, mark.lasti)
        program: Program | None = None
        tensors: dict[int, Tensor] = {}
        if mark.operands is not None and mark.op in FLOW:
            program, tensors = _program_of(mark, site)
        return Made(program, tensors, mark.op, site, mark.module, mark.result, flat, operands=_variance(mark, mark.result.shape, flat))


def _variance(mark: Mark, shape: torch.Size, flat: int) -> tuple[tuple[str, float], ...]:
    """The variance that a batch norm was given for the channel of an element; nothing where it computes its own."""
    given = mark.operands or ()
    if mark.op not in BATCH_NORMS or len(given) <= IN_TRAINING or not_read(mark.op, given) or len(shape) < 2:
        return ()
    variance, channel = given[RUNNING_STATISTICS[1]], unravel(flat, shape)[1]
    known = isinstance(variance, Tensor) and is_plain(variance) and channel < variance.numel()
    return (("running_var", at(variance, channel)),) if known else ()


def _program_of(mark: Mark, site: Site | None) -> tuple[Program, dict[int, Tensor]]:
    """The program of a single call, its operands being leaves."""
    tensors: dict[int, Tensor] = {}

    def arg_of(arg: Any) -> Arg:
        if isinstance(arg, Tensor):
            known = next((number for number, tensor in tensors.items() if tensor is arg), None)
            number = len(tensors) if known is None else known
            tensors[number] = arg
            return Ref(number)
        return tuple(arg_of(item) for item in arg) if isinstance(arg, (list, tuple)) else arg

    args = tuple(arg_of(arg) for arg in mark.operands or ())
    kwargs = tuple((name, arg_of(value)) for name, value in (mark.kwargs or {}).items())
    words = () if site is None else moved_words(base_name(mark.overload), site)
    outs: tuple[int | None, ...] = (*([None] * mark.position), len(tensors))
    names = {number: words[number] if number < len(words) else None for number in tensors}
    leaves = tuple(Leaf(number, names[number], "data", tensor.requires_grad) for number, tensor in tensors.items())
    call = Call(mark.overload, args, kwargs, outs, 0 if site is not None else -1, False, mark.module or "model")
    program = Program(leaves, (call,), len(tensors), (site,) if site is not None else (), Computes.ACTIVATION)
    return program, {number: tensor.detach() for number, tensor in tensors.items()}


def _name_of(func: Any) -> str:
    return base_name(str(func).replace("aten::", "aten.")).rstrip("_")


def _makes(kinds: Kinds, came: Kinds) -> bool:
    return (kinds.nan and not came.nan) or (kinds.posinf and not came.posinf) or (kinds.neginf and not came.neginf)


def _union(found: Sequence[Kinds]) -> Kinds:
    return Kinds(any(k.nan for k in found), any(k.posinf for k in found), any(k.neginf for k in found))


def _first(tensor: Tensor, kinds: Kinds) -> int:
    """The first element of the worst kind."""
    part = local(tensor)
    values = (tensor.detach() if part is None else part).flatten()
    bad = torch.isnan(values) if kinds.nan else values == torch.inf if kinds.posinf else values == -torch.inf
    return int(bad.int().argmax())


def _parts(tensors: Iterable[Tensor]) -> list[tuple[Tensor, Tensor]]:
    """Tensors, each with what is in memory of it: itself, or what is inside, where it is a jagged or a sparse one."""
    parts = ((tensor, tensor if is_plain(tensor) else local(tensor)) for tensor in tensors)
    return [(tensor, part) for tensor, part in parts if part is not None]


def _address(tensor: Tensor) -> Address:
    try:
        return (tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype)
    except RuntimeError:
        return (0, tuple(tensor.shape), (), tensor.dtype)


@dataclass(frozen=True, slots=True)
class MadeBackward:
    """The autograd node that made a bad gradient out of a finite one. op: of its forward. number: of the node, by order of creation.

    site: of its forward, or of the backward of a custom function, where known. received: the gradient that came in, if it has the same
    shape. function: what is known of its backward, if it is a custom one.
    """

    op: str
    number: int
    gradient: Tensor
    flat: int
    site: Site | None = None
    received: Tensor | None = None
    function: Backward | None = None


def made_backward(outputs: Sequence[Tensor], seeds: Sequence[Tensor], wanted: Sequence[Tensor]) -> MadeBackward | None:
    """Differentiate once more with a hook on every node; return the first that made something non-finite, None if none did.

    outputs: of the module, with their graph. seeds: the gradients that came into them. wanted: parameters.
    """
    found: list[MadeBackward] = []
    handles = []

    def hook_of(node: Any) -> Callable[[Any, Any], None]:
        def hook(returned: Sequence[Tensor | None], received: Sequence[Tensor | None]) -> None:
            if found or any(kinds_of(grad) for grad in received if grad is not None):
                return
            for grad in returned:
                if grad is not None and (kinds := kinds_of(grad)):
                    op, site = backward_of(node) if is_custom(node) else (op_of(node), None)
                    alike = next((came.detach() for came in received if came is not None and came.shape == grad.shape), None)
                    custom = seen(node, tuple(returned), tuple(received)) if is_custom(node) else None
                    found.append(MadeBackward(op, number_of(node), grad.detach(), _first(grad, kinds), site, alike, custom))
                    return

        return hook

    for node in _nodes([tensor.grad_fn for tensor in outputs if tensor.grad_fn is not None]):
        handles.append(node.register_hook(hook_of(node)))
    try:
        torch.autograd.grad(list(outputs), list(wanted), list(seeds), allow_unused=True)
    finally:
        for handle in handles:
            handle.remove()
    return found[0] if found else None


def _nodes(roots: Sequence[Any]) -> Iterator[Any]:
    stack, seen = list(roots), set[Any]()
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        yield node
        stack += [following for following, _ in node.next_functions if following is not None]


def part_of(number: int, spans: Sequence[tuple[int, int, str]]) -> str:
    """Return the innermost part of a model that made an autograd node."""
    around = [(end - begin, path) for begin, end, path in spans if begin <= number < end]
    return min(around)[1] if around else ""


def op_of(node: Any) -> str:
    """ExpBackward0 → exp."""
    name = re.sub(r"Backward\d*$", "", type(node).__name__)
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()
