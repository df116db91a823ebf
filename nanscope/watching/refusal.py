"""What an exception says of numbers: the tensor that was refused, and where that came from.

    action = torch.multinomial(probs, 1)      RuntimeError: probability tensor contains either `inf`, `nan` or element < 0
    Normal(mean, std)                         ValueError: Expected parameter loc … to satisfy the constraint Real()

A loop that samples dies there, before any loss of the step, and nothing that backward or an optimizer sees is bad. The frames that the
exception came through still hold what was refused, and what that was made of. A loop that catches it lets go of them: what a call has
refused is looked at when it raises, and told when the loop has gone on.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from types import CodeType, TracebackType
from typing import Any

import torch
from torch import Tensor

from nanscope.capture.modules import tensors_in
from nanscope.capture.sites import Place
from nanscope.capture.source import site_of, variables
from nanscope.capture.tape import Tape
from nanscope.errors import Deliberate, one_line, words_of
from nanscope.locate.observe import observe_made
from nanscope.program.calls import Computes
from nanscope.program.local import is_plain
from nanscope.program.numbers import first_nonfinite
from nanscope.snapshot.observation import Phase
from nanscope.snapshot.step import Reached
from nanscope.torch_inside import MODULE_CALLED
from nanscope.watching.closely import look_closely
from nanscope.watching.deeper import deeper_look, weight_look
from nanscope.watching.examine import Examiner, Hit
from nanscope.watching.look import Look, named_there, only_seen, told
from nanscope.watching.recording import Recording

_OF_NUMBERS = re.compile(
    r"\b(nans?|infs?|infinite|infinity|(non-?)?finite|invalid values?|between 0 and 1|converged?|singular|positive[- ]definite)\b"
    r"|index -92233720368547\d+"  # what NaN becomes as a whole number, or a little more
    r"|\bp_in\b",  # of bernoulli, which NaN is not between 0 and 1
    re.I,
)
FRAMES = 64  # that are looked at, the innermost
FEW = 16  # arguments of a call
LARGEST = 1 << 26  # elements of a tensor that is looked at
SAID = 160  # characters of an exception that are quoted


@dataclass(frozen=True, slots=True)
class Refusal:
    """A tensor with NaN that a frame holds: under which name, "" for none, and where the frame is. inside: a part of a model is called
    further out."""

    name: str
    tensor: Tensor
    code: CodeType
    lasti: int
    inside: bool


def refused_by(examiner: Examiner, error: BaseException) -> Hit | None:
    """Return what an exception refused that ends the block, None if it says nothing of numbers, or no frame of it holds NaN."""
    met = list(_met(error.__traceback__)) if _speaks_of_numbers(error) else []
    return _hit(examiner, met, ("ended_by", f"the run ended there: {_said(error)}"))


def refused_by_call(examiner: Examiner, args: tuple[object, ...], error: Exception, place: Place) -> Hit | None:
    """Return what a call refuses that raises, None if it says nothing of numbers, or was given no NaN. place: where in the trainer's
    code.

    A factorisation is asked about by what it has returned with its factors: whether it could be done.
    """
    code, lasti = place
    if code is None or not _speaks_of_numbers(error):
        return None
    given = list(tensors_in(args))
    given += [tensor for one in given if not one.is_floating_point() for tensor in examiner.tape.read_for(one)]
    met = [Refusal("", tensor, code, lasti, False) for tensor in given if _holds_nan(tensor)]
    return _hit(examiner, met, ("call_refused", f"the call raised, and the code caught it: {_said(error)}"))


def _speaks_of_numbers(error: BaseException) -> bool:
    ours = isinstance(error, (Deliberate, torch.OutOfMemoryError))
    return isinstance(error, Exception) and not ours and bool(_OF_NUMBERS.search(str(error)))


def _said(error: BaseException) -> str:
    return one_line(words_of(error))[:SAID]


def _hit(examiner: Examiner, met: list[Refusal], note: tuple[str, str]) -> Hit | None:
    return (_recorded(examiner, met, (note,)) or _seen(examiner, met[-1], (note,))) if met else None


def _met(trace: TracebackType | None) -> Iterator[Refusal]:
    """Yield the tensors with NaN in the frames of a traceback, the innermost frame first."""
    frames: list[tuple[Any, int]] = []
    while trace is not None:
        frames.append((trace.tb_frame, trace.tb_lasti))
        trace = trace.tb_next
    models = [frame.f_code is MODULE_CALLED for frame, _ in frames]
    for at in range(len(frames) - 1, max(len(frames) - 1 - FRAMES, -1), -1):
        frame, lasti = frames[at]
        for name, found in variables(frame).items():
            several = type(found) in (tuple, list) and len(found) <= FEW  # what a call was given that has no name
            for one in found if several else (found,):
                if isinstance(one, Tensor) and _holds_nan(one):
                    yield Refusal("" if several else name, one, frame.f_code, lasti, any(models[:at]))


def _holds_nan(tensor: Tensor) -> bool:
    readable = is_plain(tensor) and tensor.is_floating_point() and 0 < tensor.numel() <= LARGEST
    return readable and bool(torch.isnan(tensor.detach()).any())


def _recorded(examiner: Examiner, met: list[Refusal], notes: tuple[tuple[str, str], ...]) -> Hit | None:
    """The last of them that was computed where the tape listens, and what it was made of."""
    tape: Tape = examiner.tape
    known = [(value, one.tensor) for one in met if (value := tape.find(one.tensor)) is not None]
    for value, tensor in sorted(known, key=lambda pair: -pair[0].id):
        try:
            program, tensors = tape.program(value)
        except LookupError:
            continue
        calls, frozen = examiner.modules.so_far()
        program = replace(program, computes=Computes.ACTIVATION)
        recording = Recording(program, tensors, tensor, calls, None, frozen=frozen, places=tape.places(tensors))
        recording.look_between(tape)
        look = look_closely(recording, partial(deeper_look, recording, tape.budget * 4, examiner.modules))
        look = _placed(told(look), met, tensor) if look.seen is None else look
        if look.location is not None or look.seen is not None:
            return Hit(recording, Reached(), look=_with(look, notes))
    return None


def _placed(look: Look, met: list[Refusal], tensor: Tensor) -> Look:
    """Of what came in, and nobody has read before, tell what it is called where it was handed on, and the line."""
    seen, alike = look.seen, [one for one in met if one.tensor.is_set_to(tensor)]
    outermost = next((one for one in reversed(alike) if one.name), alike[-1])
    if seen is None or seen.phase is not Phase.INPUT or (seen.origin.variable and seen.origin.file):
        return look
    return named_there(look, outermost.name or None, site_of(outermost.code, outermost.lasti))


def _seen(examiner: Examiner, met: Refusal, notes: tuple[tuple[str, str], ...]) -> Hit:
    """The first of them, as it stands in the outermost frame: it came in, or a model made it."""
    calls, frozen = examiner.modules.so_far()
    recording = Recording(None, {}, met.tensor, calls, None, frozen=frozen)
    weight = weight_look(recording, examiner.modules) if met.inside else None
    phase, op = (Phase.FORWARD, "module") if met.inside else (Phase.INPUT, "input")
    flat = first_nonfinite(torch.where(torch.isnan(met.tensor.detach()), torch.nan, 0.0)) or 0
    seen = observe_made(op, met.tensor.detach(), flat, site_of(met.code, met.lasti), "", phase, met.name or None)
    return Hit(recording, Reached(), look=_with(weight or only_seen(seen), notes))


def _with(look: Look, notes: tuple[tuple[str, str], ...]) -> Look:
    return replace(look, notes=(*look.notes, *notes), aside=True)
