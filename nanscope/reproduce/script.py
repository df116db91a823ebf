"""A program as a script of torch: its leaves, its calls as people write them, and what goes wrong as an assert.

    log_ratio = torch.tensor([[0.0, 104.2]], requires_grad=True)
    mask = torch.tensor([[1.0, 0.0]])

    ratio = torch.exp(log_ratio)  # ← inf at [0, 1], which the loss leaves out
    loss = (ratio * mask).sum()

    loss.backward()
    assert torch.isnan(loss)

Nothing in it is a string of a file: operators are those of the whitelist, names are plain identifiers, the rest are numbers.
"""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from nanscope.program.calls import Call, Computes
from nanscope.program.ops import ALONE, EXPANSIONS, HISTORY_ENDS, MOVES, SPLITS, SQUEEZES
from nanscope.program.spelling import ATOM, Phrase
from nanscope.reproduce.alike import Case
from nanscope.reproduce.idioms import Asked, idiom
from nanscope.reproduce.literals import tensor_lines
from nanscope.reproduce.names import Remembered, fallback, own_name

WIDE = 96  # characters of a line, without its comment
INLINE = 64  # characters of an expression that stands within another one


@dataclass(frozen=True, slots=True)
class Script:
    """The pieces of a script. leaves: by name, the lines that make each tensor; body: the calls; output: what the last value is called;
    gradients: names of the leaves that get one; called: what each value is, by its id."""

    leaves: Mapping[str, Sequence[str]]
    body: Sequence[str]
    output: str
    gradients: Sequence[str]
    called: Mapping[int, str]


@dataclass(frozen=True, slots=True)
class Marks:
    """Which value of a program is the first harmful one, and what is to be said beside it."""

    value: int
    comment: str


class _Writing:
    """One program as it is written, call by call."""

    def __init__(self, case: Case, names: Remembered, marks: Marks | None) -> None:
        program = case.program
        self.program, self.names, self.tensors, self.marks, self.drawn = program, names, case.tensors, marks, case.drawn
        self.uses = Counter(value for call in program.calls for value in call.inputs())
        self.last = {value: place for place, call in enumerate(program.calls) for value in call.inputs()}
        self.last[program.output] = len(program.calls)
        self.pieces: dict[int, Phrase] = {}
        self.taken: dict[str, int] = {}  # name → the value that has it
        self.kept: set[str] = set()  # names of leaves: they are asked for their gradients at the end
        self.grad = {leaf.id for leaf in program.leaves if leaf.diff and case.tensors[leaf.id].is_floating_point()}
        self.body: list[str] = []
        self.place = -1
        self.depends: dict[int, set[int]] = {}  # the values whose names stand in what a value is written as

    def named(self, value: int, place: int) -> str:
        """Return a name for a value: its own, unless another one has it that is still read."""
        wanted = own_name(self.names, value)
        if self.program.computes is Computes.LOSS and (value == self.program.output or (wanted == "loss" and place < 0)):
            wanted = "loss" if place >= 0 else None  # the loss is what the script ends in
        wanted = wanted or fallback(self.program, self.names, value)
        wanted = "x" if wanted == "loss" and place < 0 else wanted
        return self._free(wanted, value)

    def _free(self, wanted: str, value: int) -> str:
        name, number = wanted, 2
        while name in self.kept or (name in self.taken and self._is_awaited(self.taken[name])):
            name, number = f"{wanted}_{number}", number + 1
        self.taken[name] = value
        return name

    def leaf(self, value: int) -> tuple[str, list[str]]:
        """Return the name of a leaf, and the lines that make it."""
        name = self.named(value, -1)
        self.kept.add(name)
        self.pieces[value] = Phrase(name)
        self.depends[value] = {value}
        drawn = self.drawn.get(value)
        lines = tensor_lines(name, self.tensors[value], grad=value in self.grad)
        if drawn is not None:
            made = drawn.source(self.tensors[value].shape, self.tensors[value].dtype)
            lines = [f"{name} = {made}", *([f"{name}.requires_grad_()"] if value in self.grad else [])]
        if self.marks is not None and self.marks.value == value:
            lines[:1] = _commented(lines[0], self.marks.comment)
        return name, lines

    def call(self, place: int, call: Call) -> None:
        """Write one call, as a line or into whoever reads it."""
        outs = [out for out in call.outs if out is not None and (self.uses[out] or out == self.program.output)]
        if not outs:
            return
        self.place = place
        alone = outs == [call.outs[0]] and call.name in ALONE
        piece = idiom(Asked.of(call, self.pieces, single=alone or len(call.outs) == 1))
        came = any(value in self.grad for value in call.inputs())
        ended = came and not call.grad and call.name not in HISTORY_ENDS  # it was computed without gradients
        if ended and (len(call.outs) == 1 or alone) and call.name not in SPLITS:
            piece = Phrase(f"{piece.inside(ATOM)}.detach()")
        elif ended:
            piece = Phrase(f"[part.detach() for part in {piece.text}]")
        elif came and call.grad and call.name not in HISTORY_ENDS:
            self.grad.update(outs)
        if call.name in SPLITS or (len(call.outs) > 1 and not alone):
            if len(outs) > 1:
                self._unpacked(call, outs, piece)
                return
            piece = Phrase(f"{piece.inside(ATOM)}[{call.outs.index(outs[0])}]")
        (value,) = outs
        if self._fits(value, call, piece):
            self.pieces[value] = piece
            self.depends[value] = self._read_by(call)
            return
        name = self.named(value, place)
        self._line(f"{name} = {piece.text}", [value])
        self.pieces[value] = Phrase(name)
        self.depends[value] = {value}

    def _unpacked(self, call: Call, outs: Sequence[int], piece: Phrase) -> None:
        """Several results, of which two or more are read: of a split, which may be of any number, by their places."""
        if call.name not in SPLITS:
            names = [self.named(out, self.place) if out is not None and out in outs else "_" for out in call.outs]
            self._line(f"{', '.join(names)} = {piece.text}", outs)
            self.pieces.update((out, Phrase(name)) for out, name in zip(call.outs, names, strict=True) if out is not None)
            self.depends.update((out, {out}) for out in outs)
            return
        name = self._free("parts", outs[-1])
        self._line(f"{name} = {piece.text}", outs)
        for out in outs:
            self.pieces[out] = Phrase(f"{name}[{call.outs.index(out)}]")
            self.depends[out] = set(outs)

    def _read_by(self, call: Call) -> set[int]:
        """The values whose names stand in what a call is written as."""
        return {base for value in call.inputs() for base in self.depends.get(value, {value})}

    def _is_awaited(self, value: int) -> bool:
        """Is a value, or something that is written with its name, still to be read?"""
        return any(self.last.get(one, -1) > self.place for one, bases in self.depends.items() if value in bases)

    def _fits(self, value: int, call: Call, piece: Phrase) -> bool:
        """May it stand within what reads it?"""
        marked = self.marks is not None and self.marks.value == value
        if value == self.program.output or marked or self.uses[value] != 1 or len(piece.text) > INLINE:
            return False
        carried = call.name in MOVES | EXPANSIONS | SQUEEZES
        return carried or own_name(self.names, value) is None

    def _line(self, text: str, values: Sequence[int]) -> None:
        marked = self.marks is not None and self.marks.value in values
        self.body += _commented(text, self.marks.comment) if marked and self.marks is not None else [text]


def _commented(line: str, comment: str) -> list[str]:
    """A line with what is to be said of it, beside it or above it."""
    both = f"{line}  # ← {comment}"
    return [both] if len(both) <= COMMENTED else [f"# ↓ {comment}", line]


COMMENTED = 116  # characters of a line with its comment


def source_of(case: Case, names: Remembered, marks: Marks | None, graded: Sequence[int]) -> Script:
    """Return a program as source. marks: the value that goes wrong first. graded: leaves that get a gradient."""
    program, writing = case.program, _Writing(case, names, marks)
    leaves = dict(writing.leaf(leaf.id) for leaf in program.leaves)
    for place, call in enumerate(program.calls):
        writing.call(place, call)
    called = {value: piece.text for value, piece in writing.pieces.items()}
    return Script(leaves, writing.body, called[program.output], [called[leaf] for leaf in graded], called)


def docstring(text: str, indent: str = "") -> list[str]:
    """Return text of ours as the lines of a docstring."""
    first, *paragraphs = text.split("\n")
    width = WIDE - len(indent)
    lines = textwrap.wrap(first, width - 3, break_long_words=False, break_on_hyphens=False)
    for paragraph in paragraphs:
        lines += textwrap.wrap(paragraph, width, break_long_words=False, break_on_hyphens=False) or [""]
    if len(lines) == 1:
        return [f'{indent}"""{lines[0]}"""']
    return [f'{indent}"""{lines[0]}', *(f"{indent}{line}".rstrip() for line in lines[1:]), f'{indent}"""']
