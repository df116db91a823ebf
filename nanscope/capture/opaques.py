"""Results that no program has: of calls that cannot be made again, and of calls that had to make room. Known while they are there."""

from __future__ import annotations

from torch import Tensor

from nanscope.capture.entries import PLAIN, Handle, Opaque, still_there
from nanscope.capture.log import RING
from nanscope.capture.modules import Address
from nanscope.capture.values import key_of
from nanscope.program.local import is_plain

AGAIN = RING // 8  # results that find no room until it is looked for once more: as many as are gone through for one of them


class Opaques:
    """By where they lie: of another tensor in the same place, that is as it was, the same is known.

    patience: when there are so many of them, those are looked for that are gone.
    """

    def __init__(self, patience: int) -> None:
        self._patience = self._crowd = patience
        self._made: dict[Address, tuple[Opaque, Handle]] = {}  # until they are read, or a backward pass is over
        self._lost: dict[Address, tuple[str, Handle]] = {}
        self._many = patience  # of these, when it is looked which are gone
        self._turned_away = 0  # of which nothing is known, since all that there is room for is still there

    def __len__(self) -> int:
        return len(self._made)

    def note(self, tensor: Tensor, of: Opaque) -> None:
        """A call has made it that cannot be made again. of: that."""
        self._made[_place(tensor)] = of, Handle(tensor)
        if len(self._made) > self._crowd:
            self._made = still_there(self._made)
            self._crowd = self._patience + 2 * len(self._made)

    def lose(self, tensor: Tensor, op: str) -> None:
        """A call has made it that had to make room. op: that."""
        if len(self._lost) >= RING and self._turned_away % AGAIN == 0:
            self._lost = still_there(self._lost)
        room = len(self._lost) < RING
        self._turned_away = 0 if room else self._turned_away + 1
        if room and is_plain(tensor):
            self._lost[_place(tensor)] = op, Handle(tensor)

    def has(self, tensor: Tensor) -> bool:
        """Has such a call made what lies there, and nobody read it?"""
        return bool(self._made) and is_plain(tensor) and _place(tensor) in self._made

    def made(self, tensor: Tensor) -> Opaque | None:
        """Return the call that made it, None if there is none."""
        found = self._made.get(_place(tensor)) if self._made else None
        return None if found is None or found[1].expired() else found[0]

    def calls(self) -> list[Opaque]:
        """Return the calls whose results are still there, and were not read."""
        return [known[0] for known in still_there(self._made).values()]

    def take(self, tensor: Tensor) -> Opaque | None:
        """Return the same, and forget it: it is read now, or written to."""
        found = self._made.pop(_place(tensor), None) if self._made else None
        return None if found is None or found[1].expired() else found[0]

    def lost(self, tensor: Tensor) -> str:
        """Return the call that made it and had to make room, "" if there is none."""
        found = self._lost.get(_place(tensor)) if self._lost else None
        return "" if found is None or found[1].expired() else found[0]

    def forget(self) -> None:
        """A backward pass is over. What ranks have handed to each other is read once more, by a loss that is written down later."""
        self._made = {place: known for place, known in self._made.items() if known[0].exchange and not known[1].expired()}

    def sweep(self) -> None:
        """Forget what had to make room and is gone."""
        if len(self._lost) > self._many:
            self._lost = still_there(self._lost)
            self._many = self._patience + 2 * len(self._lost)


def _place(tensor: Tensor) -> Address:
    return key_of(tensor, PLAIN)[:4]
