"""What of a run was not seen: "healthy" may be said only of what was watched."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from nanscope.text import count

GAPS = 64  # kinds of gaps kept per run


class Status(StrEnum):
    """What a run came to.

    SUSPECT: everything stayed finite, and a step was ruined all the same. PARTLY, UNWATCHED: nothing bad was seen, and not everything, or
    nothing at all, was looked at.
    """

    HEALTHY = "healthy"
    PARTLY = "partly watched"
    UNWATCHED = "unwatched"
    SUSPECT = "suspect"
    NONFINITE = "non-finite"

    @property
    def tone(self) -> str:
        """How a report shows it: "proven", "doubt" or "harm"."""
        return {Status.HEALTHY: "proven", Status.PARTLY: "doubt", Status.UNWATCHED: "doubt"}.get(self, "harm")


@dataclass(frozen=True, slots=True)
class Gap:
    """Something that training did and nobody here looked at. slug: its kind; text: what and why, in words that follow "not seen: ".

    count: how often; step: the first step at which it was missed, None where that cannot be said.
    """

    slug: str
    text: str
    step: int | None = None
    count: int = 1


def with_gap(gaps: Sequence[Gap], gap: Gap) -> list[Gap]:
    """Return the gaps with one more; one of a kind that is known is counted."""
    for index, known in enumerate(gaps):
        if (known.slug, known.text) == (gap.slug, gap.text):
            return [*gaps[:index], replace(known, count=known.count + gap.count), *gaps[index + 1 :]]
    return [*gaps, gap][:GAPS]


def gap_words(gaps: Sequence[Gap], shown: int = 3) -> str:
    """Return the gaps in words: "not seen: … (12 times); …"."""
    words = [gap.text + (f" ({gap.count} times)" if gap.count > 1 else "") for gap in gaps[:shown]]
    more = [f"and {count(len(gaps) - shown, 'more gap')}"] if len(gaps) > shown else []
    return "; ".join([*words, *more])
