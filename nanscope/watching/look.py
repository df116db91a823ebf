"""What a closer look at a bad step has shown: a program that was run, or what was seen and no program shows."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor

from nanscope.capture.alone import NotIsolated
from nanscope.capture.follow import Made
from nanscope.errors import ProgramError, visible, words_of
from nanscope.locate.describe import phase_of
from nanscope.locate.location import locate, located
from nanscope.locate.observe import observe, observe_made
from nanscope.locate.origin import Location
from nanscope.locate.trace import Trace
from nanscope.program.calls import Site
from nanscope.program.numbers import first_nonfinite
from nanscope.program.program import EMPTY, Program
from nanscope.snapshot.observation import Observation, Phase

log = logging.getLogger("nanscope")

Found = TypeVar("Found")


@dataclass(frozen=True, slots=True)
class Look:
    """A program that was run, and what went wrong in it. second: the model's forward is part of the program. seen: what no program
    shows. kernel: the program is what a kernel's loss was written out as. notes: slug and text. again: the model was run once more,
    and showed nothing. aside: the program does not end in the loss."""

    trace: Trace | None
    location: Location | None
    second: bool = False
    seen: Observation | None = None
    kernel: bool = False
    notes: tuple[tuple[str, str], ...] = ()
    again: bool = False
    aside: bool = False

    @property
    def knows_the_backward(self) -> bool:
        """Was all of this rank's backward made once more, from the loss to the weights?"""
        return self.again or (self.trace is not None and not any(leaf.diff and leaf.origin in HIDING for leaf in self.program.leaves))

    @property
    def program(self) -> Program:
        """The program, an empty one where none was run."""
        return EMPTY if self.trace is None else self.trace.program

    @property
    def tensors(self) -> dict[int, Tensor]:
        """Its leaves, by id."""
        return {} if self.trace is None else self.trace.tensors


HIDING = ("module", "opaque", "cut")  # leaves that were computed, where the tape did not see it

NOTHING = Look(None, None)


def walked(program: Program, tensors: dict[int, Tensor], first_in: Tensor | None = None) -> Look | None:
    """Run a program and walk through it; None if nothing in it is bad.

    first_in: what it ended in at the time. Made once more, with what was kept since, it may go bad at other elements, too.
    """
    trace = Trace.of(program, tensors, lean=True)
    location = locate(trace)
    made = trace.values[program.output]
    if location is not None and first_in is not None and first_in.shape == made.shape:
        both = ~(torch.isfinite(made) | torch.isfinite(first_in.detach().to(made.device))).flatten()
        flat = int(both.int().argmax())
        location = located(trace, flat) if bool(both[flat]) and flat != first_nonfinite(made) else location
    return None if location is None else Look(trace, location, second=True)


def told(look: Look) -> Look:
    """What led to an argument, where that is the origin: a program, or, of what came in, what was seen of it."""
    if look.trace is None or look.location is None or look.location.origin.born:
        return look
    location = replace(look.location, phase=phase_of(look.trace, look.location.origin, Phase.FORWARD))
    return only_seen(replace(observe(location, look.trace), outside=True))


def only_seen(observed: Observation) -> Look:
    """Return what was seen, and no program shows."""
    return replace(NOTHING, second=True, seen=observed)


def made_look(made: Made) -> Look:
    """What a call inside of a module made."""
    if made.program is not None:
        with contextlib.suppress(ProgramError):
            look = walked(made.program, made.tensors)
            if look is not None:
                return look
    seen = observe_made(made.op, made.result, made.flat, made.site, made.module, Phase.FORWARD)
    return only_seen(replace(seen, origin=replace(seen.origin, operands=made.operands)))


def given_look(tensor: Tensor, site: Site | None, module: str, op: str = "") -> Look:
    """What a model was given. op: what made it, as far as it is known; where nobody has computed it, it is data."""
    op = op or ("input" if tensor.grad_fn is None else "opaque")
    seen = observe_made(op, tensor, first_nonfinite(tensor) or 0, site, module, Phase.INPUT if op == "input" else Phase.FORWARD)
    words = site.args if site is not None and len(site.args) == 1 else ()
    return only_seen(replace(seen, origin=replace(seen.origin, variable=words[0] if words else None)))


def named_there(look: Look, name: str | None, site: Site | None) -> Look:
    """Give what came in the name and the line that it has where it was handed on, as far as it has none."""
    if look.seen is None:
        return look
    origin = replace(look.seen.origin, variable=look.seen.origin.variable or name)
    if site is not None and not origin.file:
        origin = replace(origin, file=site.file, line=site.line, function=site.function, source=site.source)
    return replace(look, seen=replace(look.seen, origin=origin))


def is_settled(location: Location) -> bool:
    """Does a location name the operation, or data, that made the harm, and not only something that hides it?"""
    return location.origin.leaf is None or location.origin.leaf.origin not in HIDING


def run_again(notes: list[tuple[str, str]], look: Callable[[], Found | None], what: str = "the model") -> Found | None:
    """Look at what runs the trainer's code again; None, and a note, where that is not possible."""
    try:
        return look()
    except Exception as error:  # noqa: BLE001 - it is anybody's code, and may not like to be run again
        why = str(error) if isinstance(error, NotIsolated) else words_of(error)
        failed = f"{what} could not be run again on a copy: {why}"
        note = ("not_run_again", f"{failed}; what is told is what the step itself has shown")
        if note not in notes:
            notes.append(note)
            log.warning("nanscope [second-look-failed]: %s", visible(failed))
        return None
