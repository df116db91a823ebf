"""The finished backward passes of the running step, on the account of what may be held."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence, Set
from typing import overload

from torch import Tensor, nn

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
        self._models: tuple[weakref.ref[nn.Module], ...] = ()  # replaced, never changed: other threads ask
        self._bare: tuple[weakref.ref[Tensor], ...] = ()
        account.spare = self._spare

    def trade_places(self, other: Recordings) -> None:
        """These are with the thread from now on that the others were with, and the other way round."""
        self._account, self._look, other._account, other._look = other._account, other._look, self._account, self._look
        self._account.spare, other._account.spare = self._spare, other._spare

    def __len__(self) -> int:
        return len(self._held)

    def __iter__(self) -> Iterator[Recording]:  # that of any sequence ends by raising, in every step
        return iter(self._held)

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

    def reach(self, recording: Recording) -> None:
        """A backward pass begins: to which weights will it come?"""
        models = {model for call in recording.calls for model in call.models}
        for model in models:
            if not self.reached(model):
                self._models = (*self._models, weakref.ref(model))
        if not models:
            leaves = (tensor for tensor in recording.tensors.values() if tensor.requires_grad and tensor.is_leaf)
            self._bare = (*self._bare, *map(weakref.ref, leaves))

    def reached(self, module: nn.Module) -> bool:
        """Has one of them come to a model?"""
        return any(known() is module for known in self._models)

    def reached_some(self) -> bool:
        """Is one of the models still there that they have come to?"""
        return any(known() is not None for known in self._models)

    def reach_to(self, weights: Set[int]) -> bool:
        """Do they come to one of these weights? weights: by id."""
        models = [model for known in self._models if (model := known()) is not None]
        bare = [id(weight) for known in self._bare if (weight := known()) is not None]
        return any(id(one) in weights for model in models for one in model.parameters()) or not weights.isdisjoint(bare)

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

    def let_go_of_weights(self) -> None:
        """Refer to no weight any more, not even weakly: they are about to be others."""
        self.let_go()
        self._bare = ()

    def clear(self) -> None:
        """Begin another step."""
        self.let_go()
        self.made, self._models, self._bare = 0, (), ()

    def join(self, other: Recordings) -> None:
        """Take those of another thread, which has made them for the same step."""
        self._held += other._held
        self.made += other.made
        self._models, self._bare = (*self._models, *other._models), (*self._bare, *other._bare)
        other._held.clear()

    def _spare(self) -> bool:
        """Let go of the oldest one, unless nobody has asked it so far."""
        if not self._held or not self._held[0].looked:
            return False
        self._held.pop(0).let_go()
        return True
