"""What watches a process without having been asked in its code, as in a run that it takes part in: there is one at most, and it gives way.

A `watch` of the process's own takes its place for as long as it lasts, and its place in the run.
"""

from __future__ import annotations

import os
from collections.abc import Callable

from nanscope.watching.invitation import Invitation
from nanscope.watching.marked import mark


class Ambience:
    """One a process, empty where it takes part in no run. invitation: to that run."""

    def __init__(self) -> None:
        self.invitation: Invitation | None = None
        self._mark: object = None
        self._leader = 0  # the number of a process
        self._begin: Callable[[], Callable[[str], None]] | None = None
        self._end: Callable[[str], None] | None = None

    def begin(self, invitation: Invitation, begin: Callable[[], Callable[[str], None]], *, leads: bool = False) -> None:
        """Begin to watch. begin: does it, and returns what ends it, which is told the class of what was raised, "" if nothing was.

        leads: it is this process that has begun the run.
        """
        self.invitation, self._begin, self._leader = invitation, begin, os.getpid() if leads else 0
        self._mark = mark()
        self.resume()

    @property
    def leads(self) -> bool:
        """Has this process begun the run? One that was forked from it has not."""
        return self._leader == os.getpid()

    def resume(self) -> None:
        """Watch again."""
        if self._begin is not None and self._end is None:
            self._end = self._begin()

    def rest(self, raised: str = "") -> bool:
        """Watch no more. raised: class of what ended it. Returns whether it did watch."""
        end, self._end = self._end, None
        if end is not None:
            end(raised)
        return end is not None

    def over(self) -> None:
        """The run is over, and the process takes part in none."""
        if self.leads:  # of a forked process the one that began the run thinks as before, until it ends
            self._mark = None
        self.invitation, self._begin, self._leader = None, None, 0


AMBIENCE = Ambience()  # of the process, as its environment is
