"""Computes a line, or a part of the model, in float32 instead of half precision.

line        it and all that follows; what was made before gets its gradient in half precision
part        what comes in is made wider, what goes out is cast back, the casts to half in between and its own weights are float32: a
            gradient that overflows in there is in range once it has left the part
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch

from nanscope.errors import ProgramError
from nanscope.program.by_rows import execute_ends
from nanscope.program.calls import Arg, Call, Ref, substitute
from nanscope.program.numbers import is_finite
from nanscope.program.program import Program
from nanscope.program.run import Run
from nanscope.replay.patch import Patch, Variant, in_order

HALVES = (torch.float16, torch.bfloat16)


def upcast_fp32(patch: Patch) -> Variant | None:
    """Compute the origin's call, and what follows it, in float32; or, if a gradient overflows on, the smallest part around it that heals.

    Each of them is run.
    """
    index = patch.origin.call
    if index is None:
        return None
    line = _line(patch, index) if patch.values[patch.origin.value_id].dtype in HALVES else None
    if not math.isfinite(patch.origin.value) or not _bad_backward(patch.program, patch.trace.run):
        return line
    halves = any(patch.values[value].dtype in HALVES for value in (patch.origin.value_id, *patch.call.inputs()))
    wider = _parts_in_float32(patch) if halves else ()
    return next((variant for variant in (*([line] if line else []), *wider) if _heals(variant)), line)


def _bad_backward(program: Program, run: Run) -> bool:
    """Is a gradient bad, and the output is not?"""
    bad = (grad for grad in run.grads.values() if not bool(is_finite(grad)))
    return bool(is_finite(run.values[program.output])) and next(bad, None) is not None


def _heals(variant: Variant) -> bool:
    try:
        run = execute_ends(variant.program, variant.tensors)
    except ProgramError:
        return False
    return bool(is_finite(run.values[variant.program.output])) and not _bad_backward(variant.program, run)


def _line(patch: Patch, index: int) -> Variant:
    """The line in float32, and what follows as far as torch makes it so by itself; all of that, where it is not enough."""
    narrow = _line_in_float32(patch, index, only=True)
    return narrow if _heals(narrow) else _line_in_float32(patch, index)


def _line_in_float32(patch: Patch, index: int, *, only: bool = False) -> Variant:
    program = patch.program
    # A line is several calls: an epsilon that vanishes does so before the division, and what it met was rounded before that.
    line = _line_of(program, index)
    index = next(i for i in range(len(program.calls)) if i == index or (line is not None and _line_of(program, i) == line))
    lifted: dict[int, int] = {}
    calls: list[Call] = list(program.calls[:index])
    fresh = program.new_id()
    for at, call in enumerate(program.calls[index:], start=index):
        if only and line is not None and _line_of(program, at) != line:
            calls.append(call)
            continue
        for value in call.inputs():
            half = value in patch.values and patch.values[value].dtype in HALVES
            if half and value not in lifted and _made_before(program, value, index):
                calls.append(Call("aten._to_copy.default", (Ref(value),), (("dtype", torch.float32),), (fresh,), call.site, call.grad))
                lifted[value] = fresh
                fresh += 1
        args = tuple(substitute(arg, lifted) for arg in call.args)
        kwargs = tuple((name, torch.float32 if arg in HALVES else substitute(arg, lifted)) for name, arg in call.kwargs)
        calls.append(replace(call, args=args, kwargs=kwargs))
    return Variant(
        "upcast_fp32", f"compute {patch.acting} and what follows in float32", replace(program, calls=tuple(calls)), patch.tensors
    )


def _line_of(program: Program, index: int) -> tuple[str, int] | None:
    site = program.site_of(program.calls[index])
    return (site.file, site.line) if site is not None and site.line else None


def _made_before(program: Program, value: int, index: int) -> bool:
    made = program.producers.get(value)
    return made is None or made < index


def _parts_in_float32(patch: Patch) -> Iterator[Variant]:
    """Yield the program with the part of the origin in float32: its module or function, what that is a part of, and so on, then all."""
    program, own = patch.program, patch.call
    made = program.maker(next(own.inputs(), -1)) if patch.values[patch.origin.value_id].dtype not in HALVES else None  # a cast back to half
    near = [own] if made is None else [own, made]
    path = _path(own)
    wholes: list[tuple[str, Callable[[Call], bool]]] = [
        (_called(patch, own), lambda call: any(_place(program, call) == _place(program, one) for one in near)),
    ]
    while "." in path:
        path = path.rpartition(".")[0]
        wholes.append((path, lambda call, path=path: _path(call) == path or _path(call).startswith(f"{path}.")))  # type: ignore[misc]
    if own.module:
        wholes.append(("the model", lambda call: bool(call.module)))
    wholes.append(("everything", lambda call: True))
    tried = set[frozenset[int]]()
    for name, belongs in wholes:
        part = frozenset(index for index, call in enumerate(program.calls) if belongs(call))
        if part not in tried:
            tried.add(part)
            yield _in_float32(patch, part, name)


def _path(call: Call) -> str:
    """`layers.0.norm (RMSNorm)` → `layers.0.norm`; the outermost module has none."""
    return call.module.partition(" (")[0] if " (" in call.module else ""


def _place(program: Program, call: Call) -> tuple[str, ...]:
    site = program.site_of(call)
    return (call.module, *(() if call.module or site is None else (site.file, site.function)))


def _called(patch: Patch, call: Call) -> str:
    site = patch.program.site_of(call)
    return call.module or (site.function if site is not None else "the calls around it")


def _in_float32(patch: Patch, part: frozenset[int], name: str) -> Variant:
    program, tensors = patch.program, patch.tensors
    fresh = program.new_id()
    wide: dict[int, int] = {}  # what is in half precision → the same in float32, inside
    narrow: dict[int, int] = {}  # what the part has made → that in half precision, outside
    inside = {out for index in part for out in program.calls[index].outs if out is not None}
    weights = False
    for leaf in program.leaves:
        readers = program.consumers.get(leaf.id, ())
        if leaf.origin == "parameter" and tensors[leaf.id].dtype in HALVES and readers and part.issuperset(readers):
            tensors[leaf.id], wide[leaf.id], weights = tensors[leaf.id].float(), leaf.id, True
    calls: list[Call] = []

    def cast(value: int, dtype: torch.dtype, like: Call) -> int:
        nonlocal fresh
        calls.append(Call("aten._to_copy.default", (Ref(value),), (("dtype", dtype),), (fresh,), like.site, like.grad, like.module))
        fresh += 1
        return fresh - 1

    for index, call in enumerate(program.calls):
        for value in dict.fromkeys(call.inputs()):
            if patch.values[value].dtype not in HALVES:
                continue
            if index in part and value not in inside and value not in wide:
                wide[value] = cast(value, torch.float32, call)
            elif index not in part and value in inside and value not in narrow:
                narrow[value] = cast(value, patch.values[value].dtype, call)
        mapping = wide if index in part else narrow
        args: tuple[Arg, ...] = tuple(substitute(arg, mapping) for arg in call.args)
        kwargs = tuple((key, substitute(arg, mapping)) for key, arg in call.kwargs)
        if index in part:
            args, kwargs = tuple(_wider(arg) for arg in args), tuple((key, _wider(arg)) for key, arg in kwargs)
        calls.append(replace(call, args=args, kwargs=kwargs))
    label = f"compute {name} in float32, {'its weights included' if weights else 'its casts to half included'}"
    return Variant("upcast_fp32", label, in_order(replace(program, calls=tuple(calls))), tensors)


def _wider(arg: Arg) -> Arg:
    return torch.float32 if arg in HALVES else arg
