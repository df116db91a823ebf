"""The calls of aten that torch's own samples of its operators make, as programs of one call: what a script has to be able to say."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from nanscope.errors import NanscopeError
from nanscope.program.calls import Arg, Call, Computes, Leaf, Ref, overload
from nanscope.program.ops import FLOW, base_name
from nanscope.program.program import Program
from nanscope.program.safety import DTYPES
from nanscope.reproduce.alike import Case
from tests.opinfos import _operators, _samples

MOST = 6  # calls of one overload that are looked at
SMALL = 512  # elements


@dataclass(frozen=True, slots=True)
class Called:
    """One call, and what it reads and makes."""

    case: Case
    results: tuple[Tensor, ...]

    @property
    def call(self) -> Call:
        return self.case.program.calls[0]


class _Listening(TorchDispatchMode):
    def __init__(self, found: dict[str, list[Called]]) -> None:
        super().__init__()
        self.found = found

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = function(*args, **kwargs)
        name = str(function)
        if name.startswith("aten.") and base_name(name) in FLOW and len(self.found.setdefault(name, [])) < MOST:
            with contextlib.suppress(NanscopeError, TypeError, ValueError), _disabled():
                made = _called(name, args, kwargs, result)
                if made is not None:
                    self.found[name].append(made)
        return result


def _disabled() -> contextlib.AbstractContextManager[object]:
    return torch.utils._python_dispatch._disable_current_modes()


def _called(name: str, args: Any, kwargs: Any, result: Any) -> Called | None:
    overload(name)
    tensors: dict[int, Tensor] = {}

    def taken(arg: Any) -> Arg:
        if isinstance(arg, Tensor):
            if arg.dtype not in DTYPES or arg.numel() > SMALL or arg.layout is not torch.strided:
                raise ValueError
            tensors[len(tensors)] = arg.detach().clone(memory_format=torch.contiguous_format)
            return Ref(len(tensors) - 1)
        if isinstance(arg, (list, tuple)):
            return tuple(map(taken, arg))
        if arg is None or isinstance(arg, (bool, int, float, str, torch.dtype, torch.device, torch.memory_format, torch.layout)):
            return arg
        raise TypeError

    given, named = taken(args), tuple(sorted((key, taken(arg)) for key, arg in kwargs.items()))
    assert isinstance(given, tuple)
    made = tuple(one for one in (result if isinstance(result, (list, tuple)) else [result]) if isinstance(one, Tensor))
    if not made or any(one.numel() > SMALL for one in made):
        return None
    outs = tuple(len(tensors) + place for place in range(len(made)))
    program = Program(
        tuple(Leaf(value, None, "data", False) for value in tensors), (Call(name, given, named, outs),), outs[0], (), Computes.ACTIVATION
    )
    again = program.execute(tensors, backward=False)
    return Called(Case(program, tensors), tuple(again.values[out] for out in outs if out in again.values))


def calls_of_samples(every: int = 1) -> Iterator[Called]:
    """Yield them. every: only those of one operator in so many."""
    found: dict[str, list[Called]] = {}
    for number, (op, variant) in enumerate(_operators()):
        if number % every:
            continue
        with warnings.catch_warnings(), contextlib.suppress(Exception):
            warnings.simplefilter("ignore")
            for sample in _samples(op, variant):
                with torch.no_grad(), _Listening(found), contextlib.suppress(Exception):
                    _operators()[op, variant].op(sample.input, *sample.args, **sample.kwargs)
    for several in found.values():
        yield from several
