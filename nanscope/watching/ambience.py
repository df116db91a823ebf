"""What watches a process that takes part in somebody's run without having been asked in its code: there is one at most, and it gives way.

A `watch` of the process's own takes its place for as long as it lasts, and its place in the run.
"""

from __future__ import annotations

from collections.abc import Callable

from nanscope.watching.invitation import Invitation


class Ambience:
    """One a process, empty where nobody else's run is taken part in. invitation: to that run."""

    def __init__(self) -> None:
        self.invitation: Invitation | None = None
        self._begin: Callable[[], Callable[[], None]] | None = None
        self._end: Callable[[], None] | None = None

    def begin(self, invitation: Invitation, begin: Callable[[], Callable[[], None]]) -> None:
        """Begin to watch. begin: does it, and returns what ends it."""
        self.invitation, self._begin = invitation, begin
        self.resume()

    def resume(self) -> None:
        """Watch again."""
        if self._begin is not None and self._end is None:
            self._end = self._begin()

    def rest(self) -> bool:
        """Watch no more. Returns whether it did."""
        end, self._end = self._end, None
        if end is not None:
            end()
        return end is not None


AMBIENCE = Ambience()  # of the process, as its environment is
