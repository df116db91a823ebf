"""Two saved steps call by call: both programs are run, laid side by side by line and operator, and compared bit by bit.

Two ranks of one step, a step and the one before it, the step of two releases; or one file, as it was recorded against as it comes out here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import SequenceMatcher
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nanscope.compare.model import ComparedCall, ComparedLeaf, ComparedStep, Comparison, Difference
from nanscope.errors import NanscopeError
from nanscope.locate.trace import Trace
from nanscope.program.calls import Call, Computes, refs
from nanscope.program.program import Program
from nanscope.snapshot.file import load
from nanscope.snapshot.history import Entry, last_entries
from nanscope.snapshot.runs import bad_step_files, in_order
from nanscope.snapshot.runs import histories as histories_of
from nanscope.snapshot.step import Snapshot
from nanscope.text import line_in, show_index, unravel

MOST = 20_000  # calls that are laid side by side where the two programs are not the same
HISTORY = 64 << 20  # bytes of one, in which its last steps stand
LISTED = 12  # calls that only one of the two has, and settings that differ
NOT_COMPARED = ("time", "seconds", "step", "rank", "thread", "worker")  # of a history: when, and where


def compare(a: Snapshot, b: Snapshot, names: tuple[str, str] = ("A", "B")) -> Comparison:
    """Compare two saved steps. names: what they are called in what is said.

    Raises ProgramError if one of them cannot be run.
    """
    ours, theirs = (Trace.of(one.program, one.tensors, backward=False) for one in (a, b))
    pairs, only_a, only_b = _aligned(a.program, b.program)
    found = _walk(ours, theirs, pairs)
    return Comparison(
        *names,
        loss_a=_loss(a),
        loss_b=_loss(b),
        leaves=tuple(_leaves(ours, theirs, pairs)),
        calls=len(pairs),
        alike=found.alike,
        first=found.first,
        born=found.born,
        parted=found.parted,
        only_a=tuple(_told(a.program, call) for call in only_a[:LISTED]),
        only_b=tuple(_told(b.program, call) for call in only_b[:LISTED]),
        history=histories(a.history, b.history),
        surroundings=tuple(_surroundings(a, b)),
    )


def replayed(a: Snapshot, name: str = "recorded") -> Comparison:
    """Compare a saved step, as it was recorded, with itself as it comes out here: the loss and the gradients that the file keeps.

    Raises ProgramError if it cannot be run, NanscopeError if it is none of a loss.
    """
    if a.program.computes is not Computes.LOSS or not a.program.calls:
        raise NanscopeError(
            "nothing in this file is to come out again: it holds a loss and gradients, and its program computes none. Name a second file",
            slug="nothing-to-compare",
        )
    trace = Trace.of(a.program, a.tensors)
    made = trace.values[a.program.output]
    leaves = []
    if a.loss is not None:
        leaves.append(_again("loss", "loss", a.loss, made.reshape(a.loss.shape) if made.numel() == a.loss.numel() else made))
    for leaf, called in _named(trace):
        if leaf in a.grads:
            leaves.append(_again(f"gradient of {called or leaf}", "grad", a.grads[leaf], trace.run.grads.get(leaf)))
    return Comparison(name, "replayed", _loss(a), float(made.double().sum()), tuple(leaves), len(a.program.calls), len(a.program.calls))


def _again(name: str, role: str, kept: Tensor, now: Tensor | None) -> ComparedLeaf:
    """What a file keeps of a result, and what comes out here."""
    if now is None:
        return ComparedLeaf(name, role, None, "no gradient came here")
    if now.shape != kept.shape:
        return ComparedLeaf(name, role, None, f"{show_index(kept.shape)} in the file, {show_index(now.shape)} here")
    return ComparedLeaf(name, role, apart(kept, now))


def histories(a: Sequence[Entry], b: Sequence[Entry]) -> tuple[ComparedStep, ...]:
    """Return what differs in two histories, of the steps that both have, in the order of the first step at which it does."""
    mine, theirs = ({(entry.step, entry.update, entry.optimizer): entry.to_json() for entry in side} for side in (a, b))
    both = [key for key in mine if key in theirs]
    found: dict[str, ComparedStep] = {}
    for key in sorted(both, key=lambda key: (key[0], key[1] or 0)):
        left, right = mine[key], theirs[key]
        for name in dict.fromkeys([*left, *right]):
            if name in NOT_COMPARED or left.get(name) == right.get(name):
                continue
            before = found.get(name)
            if before is None:
                found[name] = ComparedStep(name, key[0], left.get(name), right.get(name), 1, len(both))
            else:
                found[name] = replace(before, differ=before.differ + 1)
    return tuple(sorted(found.values(), key=lambda one: one.step))


def compare_runs(a: Path, b: Path, names: tuple[str, str] = ("A", "B")) -> Comparison:
    """Compare two run directories: their histories, of each its first process, and their first bad steps where both have saved one.

    Raises ProgramError if such a step cannot be run, SnapshotError if it cannot be read.
    """
    bad = [sorted(bad_step_files(run)) for run in (a, b)]
    first = [next(iter(sorted(files, key=lambda path: in_order(path.name))), None) for files in bad]
    found = Comparison(*names)
    if first[0] is not None and first[1] is not None:
        found = compare(load(first[0]), load(first[1]), names)
    ours, theirs = _entries(a), _entries(b)
    longer = (("steps in the history", str(len(ours)), str(len(theirs))),) if len(ours) != len(theirs) else ()
    return replace(found, history=histories(ours, theirs), surroundings=(*longer, *found.surroundings))


def _entries(run: Path) -> list[Entry]:
    written = histories_of(run)
    return [] if not written else [*reversed(list(last_entries(written[min(written)], HISTORY)))]


def apart(a: Tensor, b: Tensor) -> Difference | None:
    """Return how far two tensors of one shape are apart, None if they are the same bit by bit (a NaN is one like the other)."""
    x, y = (tensor.detach().cpu() for tensor in (a, b))
    x, y = (tensor.to_dense() if tensor.layout is not torch.strided else tensor for tensor in (x, y))
    if not x.is_floating_point() or not y.is_floating_point():
        x, y = (tensor if tensor.is_complex() else tensor.double() for tensor in (x, y))
    if x.is_complex() or y.is_complex():
        x, y = (torch.view_as_real(tensor.to(torch.complex128)) for tensor in (x, y))
    differ = ~((x == y) | (torch.isnan(x) & torch.isnan(y)))
    if not bool(differ.any()):
        return None
    flat = int(differ.reshape(-1).int().argmax())
    fine = torch.isfinite(x) & torch.isfinite(y)
    far = (x.double() - y.double()).abs()[fine]
    size = max((float(t.double().abs()[torch.isfinite(t)].max()) for t in (x, y) if bool(torch.isfinite(t).any())), default=0.0)
    largest = float(far.max()) if far.numel() else 0.0
    bad = [int((~torch.isfinite(t)).sum()) for t in (x, y)]
    return Difference(
        int(differ.sum()), x.numel(), largest, largest / size if size else 0.0, unravel(flat, tuple(x.shape)),
        float(x.reshape(-1)[flat]), float(y.reshape(-1)[flat]), *bad,
    )  # fmt: skip


# -- side by side --------------------------------------------------------------------------------------------------------------------------


def _aligned(a: Program, b: Program) -> tuple[list[tuple[Call, Call]], list[Call], list[Call]]:
    """The calls that both programs make at the same place, and those that one of them makes alone."""
    ours, theirs = ([_key(program, call) for call in program.calls] for program in (a, b))
    if ours == theirs:
        return list(zip(a.calls, b.calls, strict=True)), [], []
    close = max(len(ours), len(theirs)) <= MOST
    blocks = SequenceMatcher(a=ours, b=theirs, autojunk=False).get_matching_blocks() if close else []
    pairs = [(a.calls[block.a + n], b.calls[block.b + n]) for block in blocks for n in range(block.size)]
    paired = {id(call) for pair in pairs for call in pair}
    return pairs, [call for call in a.calls if id(call) not in paired], [call for call in b.calls if id(call) not in paired]


def _key(program: Program, call: Call) -> tuple[str, str, str]:
    """What makes two calls the same one: operator, function and expression; lines move, and files lie elsewhere."""
    site = program.site_of(call)
    return (call.op, site.function, site.expression) if site is not None else (call.op, call.module, "")


@dataclass(slots=True)
class _Walk:
    """What was met on the way through both programs."""

    alike: int = 0
    first: ComparedCall | None = None
    born: ComparedCall | None = None
    parted: ComparedCall | None = None


def _walk(ours: Trace, theirs: Trace, pairs: Sequence[tuple[Call, Call]]) -> _Walk:
    """Go through the calls in order, up to the first that differs on the same operands and the first that is finite on one side only."""
    found = _Walk()
    same = dict[tuple[int, int], bool]()

    def alike(one: int, other: int) -> bool:
        if (one, other) not in same:
            same[one, other] = _fits(ours, theirs, one, other) and apart(ours.values[one], theirs.values[other]) is None
        return same[one, other]

    for mine, other in pairs:
        outs = [(x, y) for x, y in zip(mine.outs, other.outs, strict=False) if x is not None and y is not None]
        settings = _settings(mine, other)
        if not settings and all(alike(x, y) for x, y in outs):
            found.alike += 1
            continue
        fed = not all(alike(x, y) for x, y in zip(mine.inputs(), other.inputs(), strict=False))
        gaps = (apart(ours.values[x], theirs.values[y]) for x, y in outs if _fits(ours, theirs, x, y))
        gap = next((gap for gap in gaps if gap is not None), None)
        told = ComparedCall(_told(ours.program, mine), mine.name, _where(ours.program, mine), fed, gap, settings)
        found.first = found.first or told
        found.born = found.born or (None if fed else told)
        if found.parted is None and gap is not None and (gap.bad_a > 0) != (gap.bad_b > 0):
            found.parted = told
    return found


def _fits(ours: Trace, theirs: Trace, one: int, other: int) -> bool:
    left, right = ours.values.get(one), theirs.values.get(other)
    return left is not None and right is not None and (left.shape, left.dtype) == (right.shape, right.dtype)


def _settings(a: Call, b: Call) -> str:
    """Numbers that the code gives to one and not to the other, in words."""
    one, other = _given(a), _given(b)
    unlike = [name for name in dict.fromkeys([*one, *other]) if one.get(name) != other.get(name)]
    return ", ".join(f"{name} {one.get(name)} and {other.get(name)}" for name in unlike)


def _given(call: Call) -> dict[str, object]:
    numbers: dict[str, object] = {f"argument {position}": arg for position, arg in enumerate(call.args) if not list(refs(arg))}
    return numbers | {name: value for name, value in call.kwargs if not list(refs(value))}


def _told(program: Program, call: Call) -> str:
    site = program.site_of(call)
    return site.expression if site is not None and site.expression else call.name


def _where(program: Program, call: Call) -> str:
    site = program.site_of(call)
    return line_in(site.file, site.line) if site is not None and site.file else call.module or "no source line"


def _named(trace: Trace) -> Iterator[tuple[int, str]]:
    for leaf in trace.program.leaves:
        yield leaf.id, trace.names.name(leaf.id) or leaf.name or ""


def _leaves(ours: Trace, theirs: Trace, pairs: Sequence[tuple[Call, Call]]) -> Iterator[ComparedLeaf]:
    """Yield what came in, by where it is read: what differs first."""
    mates: dict[int, int] = {}
    for mine, other in pairs:
        for x, y in zip(mine.inputs(), other.inputs(), strict=False):
            if ours.program.leaf(x) is not None and theirs.program.leaf(y) is not None:
                mates.setdefault(x, y)
    found = []
    for leaf, name in _named(ours):
        if leaf not in mates:
            continue
        left, right = ours.values[leaf], theirs.values[mates[leaf]]
        role = str(ours.names.role(leaf) or "")
        if left.shape != right.shape or left.dtype != right.dtype:
            note = f"{list(left.shape)} {_dtype(left)} and {list(right.shape)} {_dtype(right)}"
            found.append(ComparedLeaf(name or f"leaf {leaf}", role, None, note))
        else:
            found.append(ComparedLeaf(name or f"leaf {leaf}", role, apart(left, right)))
    yield from sorted(found, key=lambda one: one.apart is None and not one.note)


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _surroundings(a: Snapshot, b: Snapshot) -> Iterator[tuple[str, str, str]]:
    for left, right in ((a.environment, b.environment), (a.settings, b.settings), (a.objective, b.objective)):
        yield from islice(_unlike(left, right), LISTED)


def _unlike(a: Mapping[str, Any], b: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str, str]]:
    for name in dict.fromkeys([*a, *b]):
        left, right = a.get(name), b.get(name)
        if isinstance(left, Mapping) and isinstance(right, Mapping):
            yield from _unlike(left, right, f"{prefix}{name}.")
        elif left != right:
            yield f"{prefix}{name}", "–" if left is None else str(left), "–" if right is None else str(right)


def _loss(snapshot: Snapshot) -> float | None:
    return None if snapshot.loss is None else float(snapshot.loss.double().sum())
