"""What the gauge of a recognised loss reads: by where that stands in its stretch, and not by what it is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from nanscope.capture.gauge import Dials, clamped, clip_of
from nanscope.capture.pattern import Code, Passage
from nanscope.capture.tape import Tape
from nanscope.program.calls import Call
from nanscope.roles import Role

ABOVE = 1 << 20  # numbers of values begin at 0, and codes below


@dataclass(frozen=True, slots=True)
class Dialled:
    """The dials of a loss that was written down, for others that hang together alike.

    dials: but for the clips, whose bounds may be others in each step. clamps: what is bounded, and by which call. compares: there is
    something of the sampler. wanted: what is read. unseen: an exponent was not held.
    """

    dials: Dials
    clamps: tuple[tuple[Code, int], ...]
    compares: bool
    wanted: tuple[Code, ...]
    unseen: bool

    @staticmethod
    def learnt(dials: Dials, stretch: Passage, tape: Tape, own: Sequence[tuple[Call, int]], sampled: bool) -> Dialled | None:
        """Return where what is read stands, None if some of it stands nowhere. own: calls of the program, each with its number in the
        stretch. sampled: log-probs of the sampler stand beside the loss."""
        compares = bool(dials.rollouts) or sampled
        held = {value: tensor for value in dials.wanted(compares) if (tensor := tape.tensor(value)) is not None}
        where = {value: found + ABOVE for value, tensor in held.items() if (found := stretch.code(tensor)) is not None}
        shapes = {held[value].shape for value in where}
        spots = {spot for value, spot in dials.exponents if value in where}
        again = {value for value, spot in dials.exponents if spot in spots}  # of the rollout, by a line that the loss has come by as well
        if any(value not in dials.masks or held[value].shape in shapes for value in held.keys() - where.keys() - again):
            return None  # what it reads stands before, and is not a mask of something else
        clipped = {value for value, _, _ in dials.clips}
        bounded = [(tape.tensor(value), number) for call, number in own if (value := clamped(call)) in clipped and value is not None]
        clamps = [(at, number) for tensor, number in bounded if tensor is not None and (at := stretch.code(tensor)) is not None]
        there = replace(dials.mapped(lambda value: where.get(value, -1)), clips=())
        wanted = {*(number - ABOVE for number in there.wanted(True)), *(code for code, _ in clamps)}
        return Dialled(there, tuple(clamps), compares, tuple(wanted), any(value not in held for value, _ in dials.exponents))

    def is_all(self, beside: Mapping[Role, Tensor]) -> bool:
        """Is that all that there is to read? beside: tensors of the batch that stand beside the loss."""
        return self.compares or Role.ROLLOUT_LOG_PROBS not in beside

    def values(self, stretch: Passage) -> dict[int, Tensor] | None:
        """Return what is read, as the dials call it; None if something was written to since."""
        found = {code + ABOVE: stretch.tensor(code) for code in self.wanted}
        return None if any(map(stretch.was_written_to, self.wanted, found.values())) else found

    def of(self, stretch: Passage) -> Dials:
        """Return the dials, with the bounds of this step."""
        if not self.clamps:
            return self.dials
        clips = (clip_of(code + ABOVE, *stretch.numbers(number)[1:]) for code, number in self.clamps)
        return replace(self.dials, clips=tuple(clip for clip in clips if clip is not None))
