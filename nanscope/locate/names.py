"""What the values of a program are called and what they mean: by the rows of the framework whose function they lie in, then by their
names in the code, then by how they are computed."""

from __future__ import annotations

from collections.abc import Container

from nanscope.locate.called import Called, around
from nanscope.locate.computed import Computed
from nanscope.locate.norms import Norms
from nanscope.locate.onward import Onward
from nanscope.locate.uses import Uses
from nanscope.program.calls import Site
from nanscope.program.ops import COPIES, DIVISIONS, PRODUCTS, SUMS
from nanscope.program.program import Program
from nanscope.roles import LOG_PROBS, SCORES, Role, fitting, role_of


class Names:
    """What the values of a program are called and what they mean: by name first, then by how they are computed.

    counted: the values that are known to be integers, or true and false.
    """

    def __init__(self, program: Program, counted: Container[int] = ()) -> None:
        self.program, self.counted = program, counted
        self._uses = Uses(program)
        self._called = Called(program, self._uses)
        self._computed = Computed(self._called, self._uses)
        self._onward = Onward(self._called, self._uses)
        self._norms = Norms(self._called)

    def name(self, value: int) -> str | None:
        """Return the variable a value is bound to, None for an intermediate result."""
        return self._called.name(value)

    def is_last(self, index: int) -> bool:
        """Is a call the last one of those that its expression stands for, so that what it makes is what the expression gives?"""
        return self._called.is_last(index)

    def named(self, value: int) -> Role | None:
        """Return the role that a value's name tells: what the framework's row says of the function it lies in, else what the name says."""
        return self._called.named(value)

    def carried(self, value: int) -> bool:
        """Does a gradient flow through a value?"""
        return self._uses.carried(value)

    def says_mask(self, value: int) -> bool:
        """Is this value called a mask, or made from nothing but a value that is?"""
        return self._called.says_mask(value)

    def role(self, value: int, via: int | None = None) -> Role | None:
        """Return what a value means, None if neither its name nor its computation tells. via: the value to look downstream from.

        The surest witness speaks first: a name; what was noted where the program was cut; the computation; who reads it; and last what
        stands around it in the source, which may be about something else. None of them makes a log-probability of an integer.
        """
        return fitting(self._told(value, via), value not in self.counted)

    def _told(self, value: int, via: int | None) -> Role | None:
        named, made = self.named(value), self.program.maker(value)
        if named is Role.REWARDS and made is not None and (made.module or self._uses.attends(value)):
            named = Role.ATTENTION  # inside a model scores are those of attention
        if named is Role.REWARDS and self._scores_an_answer(value):
            named = Role.LOG_PROBS  # the policy's own, by which answers are ranked
        if named is Role.LOG_RATIO and self._called.is_exponential(value):
            named = None  # a name that is used for one thing after another
        if named is Role.ROUTER and made is not None and not made.module:
            return self._computed.role(value) or named  # not only experts are behind a gate
        if named is Role.LOG_PROBS:
            return self._uses.role(value) or named  # of whose policy, the loss knows better than a name that does not say
        return self.by_use(value, via) if named is None else named

    def _scores_an_answer(self, value: int) -> bool:
        """Is it what a policy gives the tokens of an answer, added up, or their mean?"""
        summed, call = False, self.program.maker(value) if self._uses.carried(value) else None
        while call is not None and (call.name in SUMS | PRODUCTS | DIVISIONS.keys() or call.name in COPIES):
            summed = summed or call.name in SUMS
            value = next(call.inputs())
            if summed and self._computed.role(value) in (Role.LOGITS, *LOG_PROBS):
                return True
            call = self.program.maker(value)
        return False

    def by_use(self, value: int, via: int | None = None) -> Role | None:
        """Return what a value means whatever it is called."""
        made = self.program.maker(value)
        if (leaf := self.program.leaf(value)) is not None and leaf.role in set(Role):
            return Role(leaf.role)
        computed = self._computed.role(value)
        if computed is Role.LOG_RATIO and made is not None and made.name in SUMS:
            site = self.program.site_of(made)
            return Role.KL if site is not None and role_of(site.within) is Role.KL else computed  # their mean estimates it
        if computed is not None:
            return computed
        if made is not None and not made.module and (normed := self._norms.of(value)) is not None:
            return self._rescaled(*normed)
        if made is None:
            return self._called.read_role(value) or self._uses.role(value) or self._onward.role(value)
        site = self.program.site_of(made)
        if made.module:  # before the source is asked: a layer is called anything, and what it makes is an activation
            if self._computed.is_of_policy(made):
                return Role.LOG_PROBS
            return Role.WEIGHTS if self._computed.of_weights_only(value) else self.inside(site, made.module, self._called.ancestors(value))
        if site is None:
            return self._onward.role(value)
        callee = role_of(site.expression.partition("(")[0]) if site.expression.endswith(")") else None
        if callee in (Role.KL, Role.ENTROPY):
            return callee  # `F.kl_div(…)`
        share = self._computed.of_probabilities(made)
        told = share if share is Role.KL else role_of(site.within) or share or around(site)
        if told is None and self._computed.is_of_policy(made):
            return Role.LOG_PROBS
        if told in (Role.HIDDEN, *SCORES) and self._uses.carried(value) and self._uses.is_error(value):
            return Role.LOSS  # how far a model is off, whatever the function is about
        return told or self._onward.role(value if via is None else via)

    def _rescaled(self, source: int, result: int) -> Role | None:
        """What a value means that is divided by its own norm, and that norm with it: an activation where it carries a gradient and has no
        other name; what data are is told by what becomes of them."""
        told = self.named(source) or self._computed.role(source)
        if told is not None or self._uses.carried(source):
            return told or Role.HIDDEN
        return (
            self.named(result)
            or self._called.read_role(source)
            or self._uses.role(source)
            or self._uses.role(result)
            or self._onward.role(result)
        )

    @staticmethod
    def inside(site: Site | None, module: str, ancestors: set[Role]) -> Role:
        """Return what a value inside a model means: it is an activation; attention and routing are told by the names around it."""
        part = module.split(" ")[0].rsplit(".", 1)[-1]
        kind = module.rpartition("(")[2].rstrip(")")
        texts = (site.within, site.function.rsplit(".", 1)[-1], part, kind) if site is not None else (part, kind)
        named = [role for role in map(role_of, texts) if role is not None]
        for wanted in (Role.ATTENTION, Role.ROUTER):
            if wanted in named or wanted in ancestors:
                return wanted
        chosen = site is not None and (site.within or "").lower().endswith("probs")  # of a policy, since they are not attention's
        return next((role for role in named if role in (Role.LOGITS, Role.LOSS, Role.LOG_PROBS)), Role.LOG_PROBS if chosen else Role.HIDDEN)
