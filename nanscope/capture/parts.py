"""Which part of the model each node of autograd's graph was made in, where a model trains on several ranks and may not run again.

Nodes are numbered as they are made, and the parts of a model are called one inside the other: two numbers a call say it.
"""

from __future__ import annotations

from torch import nn

from nanscope.torch_inside import sequence_number

MOST = 1 << 16  # calls that nobody differentiates are not remembered for ever

Span = tuple[int, int, nn.Module]  # numbers of the first node that was made in a part of the model, and of the first after it


class Parts:
    """The calls of parts of the model since the last backward pass. eager: on a GPU, too, the loss is looked at before backward."""

    def __init__(self) -> None:
        self.eager = False
        self._seen: list[tuple[int, nn.Module, bool]] = []

    def enter(self, module: nn.Module) -> None:
        """A part is called."""
        self._seen.append((sequence_number(), module, True))

    def leave(self, module: nn.Module) -> None:
        """It has returned, or raised."""
        self._seen.append((sequence_number(), module, False))

    def begin(self) -> None:
        """The whole model is called."""
        if len(self._seen) > 2 * MOST:
            self._seen.clear()

    def take(self) -> list[Span]:
        """Return the calls that have returned, and forget them."""
        spans: list[Span] = []
        waiting: list[tuple[int, nn.Module]] = []
        for number, module, begins in self._seen:
            if begins:
                waiting.append((number, module))
            while not begins and waiting:  # what raised in a checkpoint never returned
                begin, known = waiting.pop()
                if known is module:
                    spans.append((begin, number, module))
                    break
        self._seen.clear()
        return spans
