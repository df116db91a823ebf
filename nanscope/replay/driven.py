"""A healthy step with one element of a value moved: what would have happened had it been larger.

program, tensors = driven(snapshot.program, snapshot.tensors, value, shape, flat, by=80.0)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from nanscope.program.calls import Arg, Call, Leaf, Ref, substitute
from nanscope.program.program import Program


def driven(
    program: Program, tensors: Mapping[int, Tensor], value: int, like: Tensor, flat: int, by: float
) -> tuple[Program, dict[int, Tensor]]:
    """Return the program in which all that reads a value finds one element of it larger, and the tensors that it needs.

    value: its id. like: what it holds in the recorded step. flat: which element. by: how much is added; the gradient passes as before.
    """
    change, moved = program.new_id(), program.new_id() + 1
    amount = torch.zeros_like(like, memory_format=torch.contiguous_format)
    amount.view(-1)[flat] = by
    index = program.producers.get(value)
    maker = program.calls[index] if index is not None else Call("", (), (), ())
    added = Call("aten.add.Tensor", (Ref(value), Ref(change)), (), (moved,), maker.site, True, maker.module)

    def reads(call: Call) -> Call:
        kwargs = tuple((name, _moved(arg, value, moved)) for name, arg in call.kwargs)
        return replace(call, args=tuple(_moved(arg, value, moved) for arg in call.args), kwargs=kwargs)

    here = 0 if index is None else index + 1
    calls = (*program.calls[:here], added, *map(reads, program.calls[here:]))
    leaves = (*program.leaves, Leaf(change, None, "data", False))
    return replace(program, calls=calls, leaves=leaves), {**tensors, change: amount}


def _moved(arg: Arg, value: int, moved: int) -> Arg:
    return substitute(arg, {value: moved})
