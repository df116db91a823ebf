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

from torch import Tensor

from nanscope.locate.names import Names
from nanscope.program.calls import Call, Computes
from nanscope.program.ops import EXPANSIONS, HISTORY_ENDS, MOVES, SQUEEZES
from nanscope.program.program import Program
from nanscope.reproduce.idioms import ATOM, Asked, Written, idiom
from nanscope.reproduce.literals import tensor_lines
from nanscope.reproduce.names import called, fallback

WIDE = 96  # characters of a line, without its comment
INLINE = 64  # characters of an expression that stands within another one


@dataclass(frozen=True, slots=True)
class Source:
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

    def __init__(self, program: Program, names: Names, tensors: Mapping[int, Tensor], marks: Marks | None) -> None:
        self.program, self.names, self.tensors, self.marks = program, names, tensors, marks
        self.uses = Counter(value for call in program.calls for value in call.inputs())
        self.last = {value: place for place, call in enumerate(program.calls) for value in call.inputs()}
        self.last[program.output] = len(program.calls)
        self.pieces: dict[int, Written] = {}
        self.taken: dict[str, int] = {}  # name → the value that has it
        self.kept: set[str] = set()  # names of leaves: they are asked for their gradients at the end
        self.grad = {leaf.id for leaf in program.leaves if leaf.diff and tensors[leaf.id].is_floating_point()}
        self.body: list[str] = []

    def named(self, value: int, place: int) -> str:
        """Return a name for a value: its own, unless another one has it that is still read."""
        wanted = called(self.program, self.names, value) or fallback(self.program, self.names, value)
        if value == self.program.output and self.program.computes is Computes.LOSS:
            wanted = "loss"
        name, number = wanted, 2
        while name in self.kept or (name in self.taken and self.last.get(self.taken[name], -1) > place):
            name, number = f"{wanted}_{number}", number + 1
        self.taken[name] = value
        return name

    def leaf(self, value: int) -> tuple[str, list[str]]:
        """Return the name of a leaf, and the lines that make it."""
        name = self.named(value, -1)
        self.kept.add(name)
        self.pieces[value] = Written(name)
        lines = tensor_lines(name, self.tensors[value], grad=value in self.grad)
        if self.marks is not None and self.marks.value == value:
            lines[-1 if len(lines) == 1 else 0] += f"  # ← {self.marks.comment}"
        return name, lines

    def call(self, place: int, call: Call) -> None:
        """Write one call, as a line or into whoever reads it."""
        outs = [out for out in call.outs if out is not None and (self.uses[out] or out == self.program.output)]
        if not outs:
            return
        piece = idiom(Asked.of(call, self.pieces))
        came = any(value in self.grad for value in call.inputs())
        if came and not call.grad and call.name not in HISTORY_ENDS:
            piece = Written(f"{piece.inside(ATOM)}.detach()")  # it was computed without gradients
        elif came and call.grad and call.name not in HISTORY_ENDS:
            self.grad.update(outs)
        several = len(call.outs) > 1 and not (outs == [call.outs[0]] and Asked.of(call, self.pieces).single and call.name in _ALONE)
        if several:
            names = [self.named(out, place) if out in outs else "_" for out in call.outs if out is not None] if None not in call.outs else [
                "_" if out is None or out not in outs else self.named(out, place) for out in call.outs
            ]
            self._line(f"{', '.join(names)}{',' * (len(names) == 1)} = {piece.text}", outs)
            self.pieces.update((out, Written(name)) for out, name in zip(call.outs, names, strict=True) if out is not None)
            return
        (value,) = outs
        if self._fits(value, call, piece):
            self.pieces[value] = piece
            return
        name = self.named(value, place)
        self._line(f"{name} = {piece.text}", [value])
        self.pieces[value] = Written(name)

    def _fits(self, value: int, call: Call, piece: Written) -> bool:
        """May it stand within what reads it?"""
        marked = self.marks is not None and self.marks.value == value
        if value == self.program.output or marked or self.uses[value] != 1 or len(piece.text) > INLINE:
            return False
        carried = call.name in MOVES | EXPANSIONS | SQUEEZES
        return carried or called(self.program, self.names, value) is None

    def _line(self, text: str, values: Sequence[int]) -> None:
        if self.marks is not None and self.marks.value in values:
            text += f"  # ← {self.marks.comment}"
        self.body.append(text)


_ALONE = frozenset(("log_sigmoid_forward", "nll_loss_forward"))  # whose other results are autograd's own


def source_of(program: Program, names: Names, tensors: Mapping[int, Tensor], marks: Marks | None, graded: Sequence[int]) -> Source:
    """Return a program as source. marks: the value that goes wrong first. graded: leaves that get a gradient."""
    writing = _Writing(program, names, tensors, marks)
    leaves = dict(writing.leaf(leaf.id) for leaf in program.leaves)
    for place, call in enumerate(program.calls):
        writing.call(place, call)
    return Source(leaves, writing.body, writing.pieces[program.output].text, [writing.pieces[leaf].text for leaf in graded], {v: p.text for v, p in writing.pieces.items()})


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
