"""What the steps of a watched run have come to since somebody last asked: the numbers that a trainer's own log gets."""

from __future__ import annotations

from nanscope.snapshot.scalars import Scalars, folded
from nanscope.watching.scope import Scope


class Stretch:
    """The lines of a scope since the last log."""

    def __init__(self, scope: Scope) -> None:
        self._scope, self._scalars, self._known = scope, Scalars(), 0

    def scalars(self) -> dict[str, float]:
        """Return their numbers, extremes and means where there are several lines; nothing where there is none."""
        history = self._scope.history
        entries, new = history.entries, history.count - self._known
        self._known += new
        return folded([self._scalars.of(entry) for entry in entries[max(0, len(entries) - new) :]])
