"""Pieces of memory, and which of them an address is in."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping


class Spans:
    """Some of them. ends: by where they begin. low, high: all are between these."""

    def __init__(self, ends: Mapping[int, int]) -> None:
        self._ends, self._starts = ends, sorted(ends)
        self.low, self.high = (self._starts[0], max(ends.values())) if ends else (0, 0)

    def __contains__(self, start: int) -> bool:
        return start in self._ends

    def __iter__(self) -> Iterator[int]:
        return iter(self._starts)

    def start_of(self, address: int) -> int:
        """Return where that begins which an address is in, 0 if it is in none."""
        below = bisect_right(self._starts, address)
        start = self._starts[below - 1] if below else 0
        return start if address < self._ends.get(start, 0) else 0
