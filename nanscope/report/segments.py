"""A sentence as pieces of prose and of code, for all renderers that show the two apart."""

from __future__ import annotations

import re
from dataclasses import dataclass

from nanscope.report.clean import Limits, clean
from nanscope.report.origin import calculation, subject, where
from nanscope.snapshot.observation import Origin


@dataclass(frozen=True, slots=True)
class Segment:
    """A piece of a sentence. code: written as code."""

    text: str
    code: bool


def segments(text: str, place: Origin, limits: Limits) -> tuple[Segment, ...]:
    """Split a sentence into words and the code it quotes."""
    spans = [subject(place, limits.text), where(place, limits.text), *([calculation(place, limits.text)] if place.operands else [])]
    spans += [clean(word, limits.text) for word in (place.expression, place.variable, *(name for name, _ in place.operands[:4])) if word]
    wanted = "|".join(re.escape(span) for span in sorted(set(spans), key=len, reverse=True) if len(span) > 2)
    if not text or not wanted:
        return (Segment(text, False),) if text else ()
    pieces = re.split(rf"(?<!\w)({wanted})(?!\w)", text)
    return tuple(Segment(piece, bool(odd % 2)) for odd, piece in enumerate(pieces) if piece)
