"""What lay in the memory of weights that a step which is over has written to: who has computed with it, and is kept, goes on with that."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor
from torch.nn import Parameter

from nanscope.capture import raw
from nanscope.capture.raw import EACH, Raw
from nanscope.capture.spans import Spans
from nanscope.capture.unseen import unseen
from nanscope.torch_inside import writes_counted


class Overwritten:
    """Of calls that have written there, and are forgotten. writes: these, the last first, each with how many calls stood before it. memory:
    where it begins, and how long it is."""

    def __init__(self, writes: Sequence[tuple[int, Raw]]) -> None:
        self.memory = {one[raw.MADE][raw.ADDRESS]: one[raw.RESULTS][0].nbytes for _, one in writes}
        self._destroyed: dict[int, list[tuple[int, Tensor]]] = {}
        for place, one in writes:
            self._destroyed.setdefault(one[raw.MADE][raw.ADDRESS], []).append((place, one[raw.DESTROYED]))
        self._spans = Spans({start: start + size for start, size in self.memory.items()})

    def given_to(self, call: Raw, place: int) -> Raw:
        """Return a call, computing with what it was given then. place: how many stood before it."""
        spans, seen = self._spans, call[raw.SEEN]
        addresses = seen[raw.ADDRESS :: EACH]
        if not any(spans.low <= address < spans.high and spans.start_of(address) for address in addresses):
            return call
        if call[raw.OPERATOR].view:
            return self._named_anew(call, place) if call[raw.OPERATOR].name == "detach" else call
        told = list(seen)
        args = self._given(call[raw.ARGS], iter(range(0, len(seen), EACH)), told, place)
        return (call[raw.OPERATOR], args, *call[raw.KWARGS : raw.SEEN], tuple(told), *call[raw.MADE :])

    def _named_anew(self, call: Raw, place: int) -> Raw:
        """Return a call that has given such memory another name as if it were made now, unless somebody has written there unseen."""
        (whole,), (writes, address, shape, wanted), made = call[raw.ARGS], call[raw.SEEN], call[raw.MADE]
        since = sum(number > place for number, _ in self._destroyed.get(address, ()))
        if writes_counted(whole) != writes + since or made[raw.WRITES] != writes:
            return call
        told = (writes + since, address, shape, wanted), (writes + since, *made[raw.ADDRESS :])
        return (*call[: raw.SEEN], *told, *call[raw.CODE :])

    def _given(self, args: Sequence[Any], at: Iterator[int], told: list[Any], place: int) -> Sequence[Any]:
        found = list(args)
        for number, arg in enumerate(args):
            if type(arg) is list or type(arg) is tuple:
                found[number] = self._given(arg, at, told, place)
            elif isinstance(arg, Tensor):
                position = next(at)
                was = self._at(told[position + raw.ADDRESS], place)
                if was is not None and (was.shape, was.stride(), was.dtype) == (arg.shape, arg.stride(), arg.dtype):
                    found[number] = was
                    told[position : position + EACH] = writes_counted(was), was.data_ptr(), told[position + raw.SHAPE], False
        return found if type(args) is list else tuple(found)

    def _at(self, address: int, place: int) -> Tensor | None:
        """What lay there before the first write after that."""
        after = [destroyed for number, destroyed in self._destroyed.get(address, ()) if number > place]
        with unseen():
            return Parameter(after[-1], requires_grad=False) if after else None  # so that it is known for a weight
