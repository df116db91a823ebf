"""What autograd has kept of a forward pass for its backward: the inside of a model that one rank alone cannot run again.

A model that is spread over ranks gathers its weights while it runs, and nobody may ask for them a second time. But when a backward pass is
about to begin, most of what the forward pass came to is still there: nodes of the graph hold their results and their operands. From a bad
output one walks back over them to the first that is bad. No part of the model is run, nothing is asked of others, and what a hook would
have to fetch or to compute (offloading, checkpointing) is left alone.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node

from nanscope.capture.follow import FINE, Kinds, kinds_of, op_of
from nanscope.capture.modules import tensors_in
from nanscope.capture.parts import Span
from nanscope.program.local import has_memory, is_plain, local
from nanscope.program.ops import ALL_SOFTMAXES, BOUNDED, KEPT_OPERANDS, LETS_IN
from nanscope.torch_inside import function_of, is_at_hand, is_flat, number_of

MOST_NODES = 1 << 18  # that are walked over

# What these give is bad where, and only where, what they were given is: it was made before.
_TAME = frozenset(
    {"view", "reshape_alias", "unsafe_view", "alias", "transpose", "t", "permute", "expand", "clone", "squeeze", "unsqueeze"} | BOUNDED
)
# Of these autograd keeps the operands, and not the result, which is had from them again.
_AGAIN: Mapping[str, Callable[..., Tensor]] = {
    **{name: getattr(torch, name) for name in KEPT_OPERANDS},
    "silu": torch.nn.functional.silu,
}

_HANDS_ON = frozenset({"RegisterPostBackwardFunction", "_NoopSaveInputs", "BackwardHookFunction"})  # functions that compute nothing

MASKED = Kinds(neginf=True)

Place = tuple[Any, int]  # a node, and which of its results


@dataclass(frozen=True, slots=True)
class KeptBad:
    """The first bad value that autograd has kept.

    op: what made it, "" where a weight that is partly elsewhere, or another rank, may have. value: it. module: the innermost part of the
    model around that, or around all that may have made it. between: what was computed of finite values before it, and was not kept.
    """

    op: str
    value: Tensor
    module: nn.Module | None
    between: tuple[str, ...]


class _Graph:
    """The nodes behind a tensor, and what they have kept. doubtful: nodes whose result others may have spoilt."""

    def __init__(self, root: Any) -> None:
        self.values: dict[Place, Tensor] = {}
        self.doubtful: set[Any] = set()
        self._kinds: dict[Place, Kinds | None] = {}
        waiting, seen = [root], set[Any]()
        while waiting and len(seen) < MOST_NODES:
            node = waiting.pop()
            if node in seen:
                continue
            seen.add(node)
            given = [getattr(before, "variable", None) for before, _ in node.next_functions]
            for tensor in _kept_by(node):
                if tensor.grad_fn is None:
                    given.append(tensor)
                else:
                    self.values.setdefault((tensor.grad_fn, tensor.output_nr), tensor)
            function = function_of(node)
            if (function is not None and function.__name__ not in _HANDS_ON) or not all(map(_is_fine, given)):
                self.doubtful.add(node)
            waiting += [before for before, _ in node.next_functions if before is not None]

    def behind(self, place: Place) -> tuple[list[Place], list[Any]]:
        """Return the nearest results behind one that are known to be bad, and the nodes whose results nobody has kept."""
        bad: list[Place] = []
        unknown: list[Any] = []
        waiting, seen = [place[0]], {place[0]}
        while waiting:
            for before in waiting.pop().next_functions:
                kinds = self.kinds(before) if before[0] is not None else FINE
                if kinds:
                    bad.append(before)
                elif kinds is None and before[0] not in seen:
                    seen.add(before[0])
                    unknown.append(before[0])
                    waiting.append(before[0])
        return bad, unknown

    def kinds(self, place: Place) -> Kinds | None:
        """Return what is bad in a result, None where it was not kept."""
        if place not in self._kinds:
            value = self.values.get(place)
            value = self._again(place) if value is None or local(value) is None else value
            self._kinds[place] = None if value is None else kinds_of(value)
        return self._kinds[place]

    def _again(self, place: Place) -> Tensor | None:
        """Return the result of a call of which plain operands were kept, and all of them; None for any other."""
        perform, operands = _AGAIN.get(op_of(place[0])), list(_kept_by(place[0]))
        if perform is None or len(operands) != len(place[0].next_functions):
            return None
        if not all(is_plain(operand) and has_memory(operand) for operand in operands):
            return None
        value = perform(*(operand.detach() for operand in operands))
        if kinds_of(value):
            self.values[place] = value
        return value


def first_kept(outputs: Iterable[Tensor], spans: Sequence[Span]) -> KeptBad | None:
    """Return the first bad value that was kept on the way to a bad output of a model, None if all outputs are finite.

    To be asked before the graph is differentiated. spans: of the parts of the model.
    """
    root = next((tensor for tensor in outputs if tensor.grad_fn is not None and kinds_of(tensor)), None)
    if root is None or root.grad_fn is None:
        return None
    place: Place = (root.grad_fn, root.output_nr)
    graph, value = _Graph(root.grad_fn), root
    way = [(place, value)]
    while True:
        bad, unknown = graph.behind(place)
        if bad:
            place = min(bad, key=lambda found: number_of(found[0]))
            value = graph.values[place]
        elif op_of(place[0]) in _TAME and place[0].next_functions[0][0] in unknown:
            place = place[0].next_functions[0]
        else:
            break
        way.append((place, value))
    if len(way) > 1 and op_of(place[0]) in LETS_IN and kinds_of(value) == MASKED:  # what came of it is to blame
        (place, value), unknown = way[-2], []
    nodes = [place[0], *(node for node in unknown if not _is_weight(node))]
    between = dict.fromkeys(op_of(node) for node in nodes[1:] if op_of(node) not in _TAME)
    op = op_of(place[0])
    if not graph.doubtful.isdisjoint(nodes) or (op in ALL_SOFTMAXES and between):  # it may have been given infinities, or only masks
        op = ""
    where = nodes[:1] if op else nodes
    return KeptBad(op, value, _around([number_of(node) for node in where], spans), tuple(between))


def _is_weight(node: Any) -> bool:
    return hasattr(node, "variable")


def _is_fine(given: Tensor | None) -> bool:
    """Is what no node made known to be finite? A weight that was gathered for the forward pass is not, if all of it is here no more.

    Infinity is what masks are made of.
    """
    if given is None:
        return True
    return bool(given.numel()) and not is_flat(given) and local(given) is not None and not kinds_of(given).nan


def _around(numbers: Sequence[int], spans: Sequence[Span]) -> nn.Module | None:
    """Return the innermost part of the model that made all nodes of these numbers."""
    around = ((end - begin, module) for begin, end, module in spans if begin <= min(numbers) and max(numbers) < end)
    return min(around, key=lambda found: found[0], default=(0, None))[1]


@lru_cache(maxsize=1024)
def _names(kind: type) -> tuple[tuple[str, str], ...]:
    """Under which names nodes of a class hold what they have kept: as it was packed, and as a tensor."""
    raw = [name for name in dir(kind) if name.startswith("_raw_saved_")]
    return tuple((name, plain if hasattr(kind, plain := name.replace("_raw", "", 1)) else plain[1:]) for name in raw)


def _kept_by(node: Node) -> Iterator[Tensor]:
    """Yield what a node has kept and holds itself: no hook of anybody's is asked for it."""
    for raw, plain in _names(type(node)):
        with contextlib.suppress(RuntimeError):  # it was let go of, or written to since
            packed = getattr(node, raw)
            if all(map(is_at_hand, packed if isinstance(packed, (tuple, list)) else (packed,))):
                yield from tensors_in(getattr(node, plain))
