"""The chain from origin to harm, ready to be drawn by any renderer."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import PurePath

from nanscope.report.clean import clean, is_finite_number, numeral, real, two
from nanscope.snapshot.observation import Link
from nanscope.verdict.incident import Incident


@dataclass(frozen=True, slots=True)
class ChainItem:
    """A link ("link", or "grad" of backward), words between links ("gap", "turn"), or what the harm came to ("end").

    at: file and line of a link, where they are known.
    """

    kind: str
    text: str
    value: str = ""
    line: str = ""
    bad: bool = False
    at: tuple[str, int] | None = None


def chain_of(incident: Incident, most: int, limit: int = 240) -> Iterator[ChainItem]:
    """Yield the links from origin to harm; the middle of a long chain is cut, its ends tell the story.

    most: links that are kept. limit: characters of each.
    """
    links = incident.chain
    tail = most // 4
    backward = False
    for position, link in enumerate(links):
        hidden = len(links) - most
        if hidden > 0 and most - tail <= position < most - tail + hidden:
            if position == most - tail:
                yield ChainItem("gap", f"… {hidden} more")
            backward = backward or link.backward
            continue
        if link.backward and not backward:
            backward = True
            yield ChainItem("turn", _turn(incident))
        yield _item(link, incident.origin.file, limit)
    for name, words in (("gradients", "weight gradients"), ("weights", "weights after the update")):
        counts = two(incident.reached.get(name))
        if counts and counts[0] and links:
            yield ChainItem("end", words, f"{counts[0]} of {counts[1]} non-finite", bad=True)


def _turn(incident: Incident) -> str:
    return f"the loss stays finite ({numeral(incident.loss)}); backward:" if is_finite_number(incident.loss) else "backward:"


def _item(link: Link, origin: str | None, limit: int) -> ChainItem:
    """A link says its file where that is not the origin's."""
    value = real(link.value)
    bad = value is not None and not math.isfinite(value)
    line = f"line {clean(link.line, 12)}" if link.line is not None else ""
    if line and link.file is not None and link.file != origin:
        line = f"{clean(PurePath(str(link.file)).name, 40)}:{clean(link.line, 12)}"
    file = link.file or origin
    at = (file, link.line) if file is not None and link.line is not None else None
    return ChainItem("grad" if link.backward else "link", clean(link.text, limit), numeral(value), line, bad, at)
