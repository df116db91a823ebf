"""Whether the learning rate has just become many times what it was: a loss that runs away then does so because of that."""

from __future__ import annotations

from collections.abc import Iterable
from weakref import WeakKeyDictionary

import torch

from nanscope.text import number

JUMP = 10.0  # times; a warmup takes no such steps, but for the one from 0
LATELY = 16  # steps


class Rates:
    """Of optimizers that were seen to step. One that lies on a device is not asked for: that would wait."""

    def __init__(self) -> None:
        self._last: WeakKeyDictionary[torch.optim.Optimizer, float] = WeakKeyDictionary()
        self._jump = 0, 0.0, 0.0  # the step of the last one, and the rates before it and in it

    def stepped(self, optimizers: Iterable[torch.optim.Optimizer], step: int) -> None:
        """They have taken their step."""
        for one in optimizers:
            rate = max((rate for group in one.param_groups if isinstance(rate := group.get("lr"), (int, float))), default=0.0)
            before = self._last.get(one, 0.0)
            self._last[one] = rate
            if 0 < JUMP * before <= rate:
                self._jump = step, before, rate

    def in_words(self, step: int) -> str:
        """Say that it has jumped shortly before a step, "" if it has not."""
        since, before, rate = self._jump
        lately = 0 < since <= step <= since + LATELY
        return f"the learning rate went from {number(before)} to {number(rate)} in step {since}" if lately else ""
