"""Calls whose results somebody has held for some steps: they wait before the others, and are gone through when there are twice as many."""

from __future__ import annotations

from collections.abc import Sequence

from nanscope.capture import raw
from nanscope.capture.entries import node_of, tensors_of
from nanscope.capture.makers import Makers
from nanscope.capture.raw import Raw

FEW = 32  # of which it is not worth while to look whether somebody still holds what they have made


class Outlasted:
    """The first of all calls that wait. calls: how many. bytes: that they hold. cleared: how often they became others."""

    def __init__(self) -> None:
        self.calls, self.bytes, self.cleared = 0, 0, 0
        self.makers = Makers()
        self._due = FEW

    def clear(self) -> None:
        """There are none."""
        self.calls, self.bytes, self.makers = 0, 0, Makers()
        self.cleared += 1

    def are_due(self) -> bool:
        """Is it time to look whether they have come to nothing?"""
        return self.calls > self._due

    def were_looked_at(self) -> None:
        """That was done, and these are left."""
        self._due = max(FEW, 2 * self.calls)

    def add(self, calls: Sequence[Raw]) -> None:
        """These wait behind them."""
        for call in calls:
            self.bytes += self.makers.enter(call, self.calls)
            self.calls += 1


def may_outlast(call: Raw) -> bool:
    """May a call wait for as long as somebody holds what it has made? Not if that, or what it has read, keeps a graph."""
    graph = any(call[raw.SEEN][raw.WANTED :: raw.EACH]) or not call[raw.SEEN]
    return not graph or all(node_of(tensor) is None for tensor in tensors_of((call[raw.ARGS], call[raw.RESULTS])))
