"""The finished backward passes of the running step, on the account of what may be held."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import overload

from nanscope.capture.account import Balance
from nanscope.watching.recording import Recording

LONGEST = 512  # backward passes that are held, however small


class Recordings(Sequence[Recording]):
    """What is still held of them, oldest first. made: how many there were in the step.

    Where the account is full the oldest are let go of, after they were asked whether anything in them was bad. look: asks all of them;
    that waits for the device.
    """

    def __init__(self, account: Balance, look: Callable[[], None]) -> None:
        self.made = 0
        self._account, self._look = account, look
        self._held: list[Recording] = []
        account.spare = self._spare

    def __len__(self) -> int:
        return len(self._held)

    @overload
    def __getitem__(self, index: int) -> Recording: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Recording]: ...
    def __getitem__(self, index: int | slice) -> Recording | Sequence[Recording]:
        return self._held[index]

    @property
    def gone(self) -> int:
        """How many are not held any more."""
        return self.made - len(self._held)

    def append(self, recording: Recording) -> None:
        """Keep one that has ended; half of the budget is left to the loss that is to come."""
        self.made += 1
        self._held.append(recording)
        account = self._account
        while len(self._held) > 1 and (account.held > account.budget // 2 or len(self._held) > LONGEST):
            if not self._spare():
                self._look()
                self._held[0].looked = True

    def let_go(self) -> None:
        """Let go of all of them; how many there were is still known."""
        for recording in self._held:
            recording.let_go()
        self._held.clear()

    def clear(self) -> None:
        """Begin another step."""
        self.let_go()
        self.made = 0

    def _spare(self) -> bool:
        """Let go of the oldest one, unless nobody has asked it so far."""
        if not self._held or not self._held[0].looked:
            return False
        self._held.pop(0).let_go()
        return True
