"""What a value goes into tells what it is, where it has no name: the first named one of what is made of it, or who reads it."""

from __future__ import annotations

import re

from nanscope.locate.called import Called, around
from nanscope.locate.uses import FAR, Uses
from nanscope.program.calls import Call, Computes
from nanscope.program.ops import DIFFERENCES, NATURAL_EXPONENTIALS, PRODUCTS, RESCALINGS, SELECTORS, SHIFTS, SOFTMAXES, carries
from nanscope.roles import LOG_PROBS, SCORES, Role, in_words, role_of

_WORTH = re.compile(r"(^|_)(critic|q\d?|qf\d?|q_?values?|values?|vf|vpred)($|_)")  # what states and actions are worth

_LOGARITHMIC = LOG_PROBS | {Role.LOG_RATIO, Role.LOGITS}  # of what is put to one of these only the result is one: of noise, or a bias

_OF_LOSSES = frozenset({Role.LOSS, Role.RATIO, Role.LOG_RATIO})  # what of a token's part in the loss is named


class Onward:
    """Where the values of a program go."""

    def __init__(self, called: Called, uses: Uses) -> None:
        self.program, self.called, self.uses = called.program, called, uses

    def role(self, value: int) -> Role | None:
        """The role of the first named value that this one goes into, or of who reads it."""
        made = self.program.maker(value)
        origin = None if made is None else self.program.site_of(made)
        home, put = None if origin is None else origin.function, False
        for _ in range(60):
            readers = self.program.readers(value)
            if not readers:
                ends = Role.LOSS if self.program.computes is Computes.LOSS else Role.HIDDEN  # what is handed to a model, or comes out of it
                return ends if value == self.program.output else None
            readers = [reader for reader in readers if reader.name not in SELECTORS]  # what is asked of a value is another thing
            if not readers:
                return None
            if readers[0].module:
                return Role.HIDDEN  # a model is given it: what becomes of its outputs says nothing of that
            if readers[0].name in SOFTMAXES and self._becomes_weight(readers[0].outs[0]):
                return Role.IS_WEIGHT
            if (taken := self.uses.taken_for(readers[0], value)) is not None:
                return taken
            if self.uses.is_compared(readers[0]) and (side := self._side(readers[0], value)) is not None:
                return side
            site = self.program.site_of(readers[0])
            called = self.called.called_by(readers[0], value)
            if called in (None, Role.MASK) and self._weighs_loss(readers[0], value):
                return Role.IS_WEIGHT
            put = put or (not self.uses.carried(value) and self._is_put(readers[0], value))
            value = next((out for out in readers[0].outs if out is not None), value)
            role = called or self.called.named(value)
            if called is None and (role in _LOGARITHMIC or readers[0].name in NATURAL_EXPONENTIALS) and put:
                return None
            if role is not None and role is not Role.MASK:
                return role
            if (
                site is not None
                and site.function != home
                and (role := around(site)) is not None
                and not self._encloses(site.function, home)
            ):
                return role  # handed to a function that tells
        return None

    def _is_put(self, reader: Call, value: int) -> bool:
        """Is it put to log-probs or logits there, or are these divided by it: noise, an offset, a temperature?"""
        others = {self._by_itself(other) for other in reader.inputs() if other != value}
        return reader.name in SHIFTS | RESCALINGS and not others.isdisjoint(_LOGARITHMIC)

    def _by_itself(self, value: int) -> Role | None:
        """What a value is by its name, by what is done with it, or as what log-probs differ by."""
        if (told := self.called.named(value) or self.uses.role(value)) is not None:
            return told
        made = self.program.maker_behind(value)
        operands = () if made is None or made.name not in DIFFERENCES else made.inputs()
        return Role.LOG_RATIO if any(self.called.named(operand) in LOG_PROBS for operand in operands) else None

    def _encloses(self, function: str, home: str | None) -> bool:
        """Has a function done something before the other one has? Then it has called that, and its name is that of what it does with all
        of its values."""
        sites = [site.function for call in self.program.calls if (site := self.program.site_of(call)) is not None]
        return home in sites[sites.index(function) :]

    def _weighs_loss(self, reader: Call, value: int) -> bool:
        """Is it a number of the data, worked out, that a part of the loss is multiplied by?"""
        others = [other for other in reader.inputs() if other != value]
        if reader.name not in PRODUCTS or len(others) != 1 or self.program.maker_behind(value) is None or self.uses.carried(value):
            return False
        other = others[0]
        if self.called.named(other) is Role.LOSS or self.uses.is_error(other):
            return True
        return self.uses.carried(other) and bool(self.called.ancestors(other) & _OF_LOSSES)

    def _becomes_weight(self, value: int | None) -> bool:
        """Is a part of the loss multiplied by it, scaled by a number as it may be?"""
        for _ in range(FAR):
            reader = next(iter(self.program.readers(value)), None) if value is not None else None
            if reader is None or value is None:
                return False
            if self._weighs_loss(reader, value):
                return True
            if not carries(reader.op) and (reader.name not in RESCALINGS or len(list(reader.inputs())) != 1):
                return False
            value = reader.outs[0]
        return False

    def _side(self, reader: Call, value: int) -> Role | None:
        """What a value that another one is compared with is: an activation, or what one is to become, but for what comes of rewards or of
        probabilities, and for what a model of rewards is to say."""
        if self.uses.carried(value):
            return None if self._is_of_policy(value) else Role.HIDDEN
        roots = self.called.ancestors(value)
        told = {self._of_model(other) for other in reader.inputs() if other != value}
        beside = [other for other in reader.inputs() if other != value]
        if any(_WORTH.search(words) for other in beside for words in self._words_of(other)):
            told.add(Role.REWARDS)  # what a critic says
        if (site := self.program.site_of(reader)) is not None:
            told.add(around(site))
        is_target = Role.HIDDEN in roots or any(self.uses.carried(other) and not self._is_of_policy(other) for other in beside)
        return min(SCORES & (roots | told), default=Role.HIDDEN if is_target else None)

    def _is_of_policy(self, value: int) -> bool:
        """Is it made of probabilities?"""
        return self.uses.comes_of_probability(value) or bool(self.called.ancestors(value) & (LOG_PROBS | {Role.LOG_RATIO, Role.LOGITS}))

    def _words_of(self, value: int) -> tuple[str, str]:
        """What a value is called, and the class of the model that gives it."""
        leaf = self.program.leaf(self.program.source_of(value))
        made_by = leaf.made_by if leaf is not None and leaf.origin == "module" else ""
        return (self.called.name(value) or "").lower(), in_words(made_by)

    def _of_model(self, value: int) -> Role | None:
        """What a model gives, by its name or by that of the model's class."""
        leaf = self.program.leaf(self.program.source_of(value))
        return None if leaf is None or leaf.origin != "module" else self.called.named(value) or role_of(leaf.made_by)
