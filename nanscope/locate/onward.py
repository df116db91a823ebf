"""What a value goes into tells what it is, where it has no name: the first named one of what is made of it, or who reads it."""

from __future__ import annotations

from nanscope.locate.called import Called, around
from nanscope.locate.uses import Uses
from nanscope.program.calls import Call, Computes
from nanscope.program.ops import PRODUCTS
from nanscope.roles import LOG_PROBS, SCORES, Role


class Onward:
    """Where the values of a program go."""

    def __init__(self, called: Called, uses: Uses) -> None:
        self.program, self.called, self.uses = called.program, called, uses

    def role(self, value: int) -> Role | None:
        """The role of the first named value that this one goes into, or of who reads it."""
        made = self.program.maker(value)
        origin = None if made is None else self.program.site_of(made)
        home = None if origin is None else origin.function
        for _ in range(60):
            readers = self.program.readers(value)
            if not readers:
                ends = Role.LOSS if self.program.computes is Computes.LOSS else Role.HIDDEN  # what is handed to a model, or comes out of it
                return ends if value == self.program.output else None
            if readers[0].module:
                return Role.HIDDEN  # a model is given it: what becomes of its outputs says nothing of that
            if (taken := self.uses.taken_for(readers[0], value)) is not None:
                return taken
            if self.uses.is_compared(readers[0]) and (side := self._side(value)) is not None:
                return side
            if self._weighs_loss(readers[0], value):
                return Role.IS_WEIGHT
            site = self.program.site_of(readers[0])
            called = self.called.called_by(readers[0], value)
            value = next((out for out in readers[0].outs if out is not None), value)
            role = called or self.called.named(value)
            if role is not None and role is not Role.MASK:
                return role
            if site is not None and site.function != home and (role := around(site)) is not None:
                return role  # handed to a function that tells
        return None

    def _weighs_loss(self, reader: Call, value: int) -> bool:
        """Is it a number of the data, worked out, that a part of the loss is multiplied by?"""
        others = [other for other in reader.inputs() if other != value]
        if reader.name not in PRODUCTS or len(others) != 1 or self.program.maker_behind(value) is None or self.uses.carried(value):
            return False
        return self.called.named(others[0]) is Role.LOSS or self.uses.is_error(others[0])

    def _side(self, value: int) -> Role | None:
        """What a value that another one is compared with is: an activation, but for what comes of rewards or of probabilities."""
        roots = self.called.ancestors(value)
        if self.uses.carried(value):
            return None if self.uses.comes_of_probability(value) or roots & (LOG_PROBS | {Role.LOG_RATIO, Role.LOGITS}) else Role.HIDDEN
        return min(SCORES & roots, default=Role.HIDDEN if Role.HIDDEN in roots else None)
