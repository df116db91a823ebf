"""What a value means by how it is computed: a difference of log-probs is a log-ratio, e to that a ratio, and so on."""

from __future__ import annotations

import re
from collections.abc import Container

from nanscope.locate.called import Called
from nanscope.locate.onward import Onward
from nanscope.locate.uses import FAR, Uses
from nanscope.program.calls import Arg, Call
from nanscope.program.ops import (
    ADDITIONS,
    BEFORE_RAISED,
    CLAMPS,
    DIFFERENCES,
    LOG_SOFTMAXES,
    NATURAL_EXPONENTIALS,
    NATURAL_LOGARITHMS,
    POWERS,
    PRODUCTS,
    QUOTIENTS,
    RESCALINGS,
    SCORE_KEEPERS,
    SELECTORS,
    SHIFTS,
    SIGMOIDS,
    SOFTMAXES,
    SQUARES,
    SUMS,
    TOPS,
    Flow,
    carries,
    flow_of,
)
from nanscope.roles import LOG_PROBS, SCORES, Role, role_of

_SPREAD = re.compile(r"(^|_)(log_?)?(std|sigma|var|variance|scale|alpha|temperature)($|_)")
_PREDICTED = re.compile(r"(^|_)(pred\w*|labels?|targets?|outputs?|q\d?|qf\w*|q_?values?|v|values?)($|_)")  # and no log-prob

_POLICY = re.compile(r"(^|_)(polic(y|ies)|prob(abilitie)?s?|pi|visits?)($|_)")

_ROUTING = re.compile(r"(^|[_.])(router|gat(e|ing)|experts?)_")

_WEIGHTS = frozenset({Role.RATIO, Role.IS_WEIGHT})

_KEPT = frozenset({Role.KL, Role.ENTROPY, Role.LOSS, Role.LOG_RATIO})  # what a number or a mask makes of these is still the same

_SMALL = 1e-3  # what is added for the sake of a division or a logarithm


class Computed:
    """The roles that the computation of values tells."""

    def __init__(self, called: Called, uses: Uses) -> None:
        self.program, self.called, self.uses = called.program, called, uses
        self._onward = Onward(called, uses)
        self._owned: dict[int, Role | None] = {}
        self._asked = 0  # calls whose results are in it

    def role(self, value: int) -> Role | None:
        """The role that the computation of a value tells: copies keep it, and some calls make one role of another."""
        call = self.program.maker(value)
        if call is None:
            return None
        name, inputs = call.name, list(call.inputs())
        if carries(call.op) or name == "neg" or (name == "add" and len(inputs) == 1 and _is_epsilon(call.args[-1])):
            return self._own(self.program.carried_by(call)) if inputs else None
        if name == "sub" and len(inputs) == 2 and self._is_top_of(inputs[1], inputs[0]):
            return Role.LOGITS  # shifted by their largest, as a softmax does
        if name in RESCALINGS and (leaf := self.program.leaf(self._behind(inputs[0], RESCALINGS))) and leaf.made_by == "backward":
            return Role.GRAD
        first = self._own(inputs[0]) if inputs and not call.module else None
        if name in RESCALINGS | SHIFTS and self.uses.is_logged(value) and self._holds_ratio(call):
            return Role.RATIO  # mixed with data, and still one policy over another
        if first in SCORES and (name in SCORE_KEEPERS or (name in SQUARES | POWERS and not self.uses.carried(value))):
            return first
        if (name in SUMS or name in RESCALINGS) and (first in LOG_PROBS or first is Role.LOG_RATIO) and self._is_of_tokens(call):
            return first  # of a sequence, or what a mask leaves of it, or its mean over tokens
        if first in _KEPT and (name in SUMS or name in CLAMPS or (name in RESCALINGS and (len(inputs) == 1 or self._is_of_tokens(call)))):
            return first
        if first in _WEIGHTS and name in CLAMPS | SQUARES | POWERS:
            return first
        if first is Role.LOG_RATIO and name in SQUARES and call.args[1:] in ((), (2,)):
            return Role.KL  # half of that estimates it
        if name in QUOTIENTS and len(inputs) == 2 and all(map(self._is_weight, inputs)):
            return Role.IS_WEIGHT  # what of a ratio is left to weigh by
        if name in DIFFERENCES and first is None and self.uses.carried(value) and any(self.uses.is_centred(call, v) for v in inputs):
            return Role.HIDDEN
        if name in ADDITIONS and len(inputs) == 2 and (told := self._shifted(name, first, self._own(inputs[1]))) is not None:
            return told
        if name in NATURAL_EXPONENTIALS and inputs:
            return self._exponential(call, value, inputs[0])
        if name == "logsumexp":
            return (
                first
                if first in (Role.LOGITS, Role.ROUTER)
                else None
                if _PREDICTED.search(self.called.name(inputs[0]) or "")
                else Role.LOG_PROBS
            )
        if name in LOG_SOFTMAXES:
            return Role.LOG_PROBS
        if name in SOFTMAXES and (first is Role.ROUTER or _ROUTING.search((self.called.name(inputs[0]) or "").lower())):
            return Role.ROUTER
        if name in NATURAL_LOGARITHMS:
            return self._logarithm(value, inputs[0], first)
        if name in PRODUCTS and self._weighs_own_logits(inputs):
            return Role.ENTROPY
        if name in RESCALINGS and inputs and role_of(self.called.name(inputs[0])) is Role.LOGITS:
            return Role.LOGITS  # scaled, by a temperature
        if name in RESCALINGS and first is Role.LOGITS and self._is_of_tokens(call):
            return Role.LOGITS
        if name in PRODUCTS and len(inputs) == 2 and not self.uses.carried(value) and first in (Role.RATIO, Role.IS_WEIGHT):
            return other if (other := self._own(inputs[1])) in SCORES else None  # weighed, and no part of a loss yet
        return None

    def _is_weight(self, value: int) -> bool:
        """Is it a ratio of probabilities, within bounds as it may be, by its name or as e to a log-ratio?"""
        value = self._behind(value, CLAMPS)
        made = self.program.maker(value)
        of_ratio = made is not None and made.name in NATURAL_EXPONENTIALS and self._own(next(made.inputs())) is Role.LOG_RATIO
        return of_ratio or self.called.named(value) in _WEIGHTS

    def _is_of_tokens(self, call: Call) -> bool:
        """Is it a sum, or a product or a quotient with a mask, or with the number of tokens that one selects?"""
        others = [value for value in list(call.inputs())[1:] if value != next(call.inputs())]
        return call.name in SUMS or (len(others) == 1 and self._counts(others[0]))

    def _counts(self, value: int) -> bool:
        call = self.program.maker(value)
        while call is not None and (call.name in SUMS or call.name in CLAMPS or carries(call.op)) and not self.called.says_mask(value):
            value = next(call.inputs(), -1)
            call = self.program.maker(value)
        return self.called.says_mask(value) or (call is not None and call.name in SELECTORS)

    @staticmethod
    def _shifted(name: str, one: Role | None, other: Role | None) -> Role | None:
        """What the sum or the difference of two values is: log-probs differ by a log-ratio, and noise on one leaves it what it is."""
        if name == "sub" and one in LOG_PROBS and other in LOG_PROBS:
            return Role.LOG_RATIO
        if name == "add" and (one is None or other is None) and not LOG_PROBS.isdisjoint({one, other}):
            return one or other
        return Role.LOG_RATIO if one is Role.LOG_RATIO and other in (Role.LOG_RATIO, Role.KL) else None

    def of_probabilities(self, call: Call) -> Role | None:
        """What is made of probabilities: their logarithm, which of a yes or a no is a loss; with it an entropy, with a log-ratio a
        divergence."""
        inputs = list(call.inputs())
        if call.name in SUMS | {"neg"} and (behind := self.program.maker_behind(inputs[0], SUMS | {"neg"})) is not None:
            call, inputs = behind, list(behind.inputs())
        if call.name in NATURAL_LOGARITHMS:
            if self.uses.is_choice(inputs[0]):
                return Role.LOG_PROBS
            return Role.LOSS if self.uses.is_probability(inputs[0]) and self.uses.carried(inputs[0]) else None
        if call.name in PRODUCTS and len(inputs) == 2:
            for probability, weighed in (inputs, reversed(inputs)):
                if self._is_probability(probability):
                    if self.uses.is_log_of(weighed, probability):
                        return Role.ENTROPY
                    if self._own(weighed) is Role.LOG_RATIO:
                        return Role.KL
        return None

    def _is_probability(self, value: int) -> bool:
        """Is it one by the call that makes it, or as e to what is a log-prob by its name?"""
        made = self.program.maker_behind(value, CLAMPS)
        of_log_prob = made is not None and made.name in NATURAL_EXPONENTIALS and self._own(next(made.inputs())) in LOG_PROBS
        return of_log_prob or self.uses.is_probability(value)

    def _logarithm(self, value: int, operand: int, role: Role | None) -> Role | None:
        """What the logarithm of something is. role: of that."""
        if self.uses.is_probability(operand) and not self.uses.is_choice(operand) and self.uses.becomes_probability(value):
            return Role.LOG_PROBS  # of a yes or a no, and one of many by the end
        if self._is_ratio(operand):
            return Role.LOG_RATIO
        if role in (Role.IS_WEIGHT, Role.ENTROPY, Role.KL, Role.LOSS):
            return role
        made = self.program.maker_behind(operand, CLAMPS)
        if (
            made is not None
            and made.name in SIGMOIDS
            and self._own(next(made.inputs())) is not Role.LOG_PROBS
            and self.uses.carried(operand)
        ):
            return Role.LOSS  # how likely one is to be preferred to another
        return Role.LOG_PROBS if LOG_PROBS & self.called.ancestors(operand) else None

    def is_of_policy(self, call: Call) -> bool:
        """Is it the logarithm of data that are called probabilities, or one that is held against log-probs?"""
        value, operand = call.outs[0], next(call.inputs(), -1)
        if call.name not in NATURAL_LOGARITHMS or value is None:
            return False
        if not self.uses.carried(operand) and _POLICY.search((self.called.name(self._behind(operand, CLAMPS)) or "").lower()):
            return True
        beside = (read for call in self.program.readers(value) if call.name in DIFFERENCES for read in call.inputs() if read != value)
        made = ((other, self.program.maker_behind(other)) for other in beside)
        return any(self.called.named(other) in LOG_PROBS or (call is not None and call.name in LOG_SOFTMAXES) for other, call in made)

    def _holds_ratio(self, call: Call) -> bool:
        """Is a ratio among what is scaled and shifted there?"""
        waiting = [call]
        for _ in range(FAR):
            if not waiting:
                break
            for read in waiting.pop(0).inputs():
                if self._own(read) is Role.RATIO:
                    return True
                made = self.program.maker_behind(read, CLAMPS)
                waiting += [made] if made is not None and made.name in RESCALINGS | SHIFTS else []
        return False

    def _is_ratio(self, value: int) -> bool:
        """Is it a ratio, or the sum of some?"""
        call = self.program.maker_behind(value, SUMS | CLAMPS | {"add"})
        made = None if call is None or call.name not in NATURAL_EXPONENTIALS else call.outs[0]
        return made is not None and self._own(made) in (Role.RATIO, Role.KL)

    def _exponential(self, call: Call, value: int, operand: int) -> Role | None:
        """What e to the power of something is."""
        role = self._own(operand)
        if self.uses.less_its_operand(call) and (role in (Role.LOG_RATIO, Role.KL) or (role is None and self._is_difference(operand))):
            return Role.KL
        if role is Role.LOG_RATIO:
            unnamed = self.called.named(operand) is not Role.LOG_RATIO
            return Role.KL if unnamed and Role.REF_LOG_PROBS in self.called.ancestors(operand) else Role.RATIO
        if call.name != "exp":
            return None
        if self.of_weights_only(value):
            return Role.WEIGHTS  # a temperature or a deviation that is learnt
        if _SPREAD.search((self.called.name(self._behind(operand, RESCALINGS)) or "").lower()):
            return Role.HIDDEN  # a standard deviation or scale that a policy puts out
        if call.module:
            return None
        if self.uses.is_score(operand):
            return Role.LOGITS  # of similarities: numerator and denominator of a softmax by hand
        added_up = self.uses.is_logged_in_the_end(value)
        if role in SCORES:
            return role if added_up else Role.IS_WEIGHT  # of a regression that good answers weigh more in
        if role in LOG_PROBS or role in (Role.ENTROPY, Role.LOSS) or (role is Role.LOGITS and (added_up or self.uses.is_shared_out(value))):
            return role  # a probability, a perplexity, a softmax by hand
        if self.uses.is_shared_out(value) and not self._is_difference(self._behind(operand, BEFORE_RAISED)):
            return Role.LOGITS
        if not added_up and self._may_be_log_ratio(operand) and self._onward.role(value) in (None, Role.LOSS, Role.ADVANTAGES, Role.HIDDEN):
            return None if self.uses.less_its_operand(call) else Role.RATIO  # it weighs tokens, whatever it is called
        return None

    def _weighs_own_logits(self, factors: list[int]) -> bool:
        """Is it a probability times the logits that it is the softmax of? Their sum is what an entropy takes from the logarithm."""
        return len(factors) == 2 and any(
            self._own(logits) is Role.LOGITS and self.uses.softmax_of(probability) == self.uses.root(logits)
            for probability, logits in (factors, reversed(factors))
        )

    def _is_difference(self, value: int) -> bool:
        """Is it what two tensors differ by, within bounds as it may be?"""
        call = self.program.maker(self._behind(value, CLAMPS))
        return call is not None and call.name in DIFFERENCES and len(set(call.inputs())) == 2

    def _may_be_log_ratio(self, value: int) -> bool:
        """Is it a sum or a difference, or did it come in from elsewhere than a model? A size or a squashed number is no log-ratio."""
        core = self._behind(value, BEFORE_RAISED)
        call, leaf = self.program.maker(core), self.program.leaf(core)
        if call is None:
            return leaf is None or leaf.origin != "module"
        return call.name in SHIFTS or flow_of(call.op) not in (Flow.POINTWISE, Flow.MATMUL)

    def _behind(self, value: int, through: Container[str]) -> int:
        """The value that this one is made of, behind calls that carry its elements and those of these names."""
        call = self.program.maker(value)
        while call is not None and (carries(call.op) or call.name in through):
            value = self.program.carried_by(call)
            call = self.program.maker(value)
        return value

    def _is_top_of(self, value: int, content: int) -> bool:
        """Is a value the largest of some others, exactly or smoothly?"""
        made = self.program.maker(value)
        return made is not None and made.name in TOPS and content in set(made.inputs())

    def of_weights_only(self, value: int) -> bool:
        """Is a value computed from parameters alone, without a single activation? Positions are of none, though nobody gave them either."""
        stack, seen, some = [value], set[int](), False
        while stack and len(seen) < 200:
            current = stack.pop()
            if current in seen:
                continue
            seen.add(current)
            made = self.program.maker(current)
            if made is not None:
                stack.extend(made.inputs())
            elif (leaf := self.program.leaf(current)) is None or not leaf.is_of_model:
                return False
            else:
                some = True
        return some and not stack

    def _own(self, value: int) -> Role | None:
        """The role of a value by itself, whatever stands around it. Each is told once, what a program makes first before the rest."""
        for call in self.program.calls[self._asked : self.program.producers.get(value, -1) + 1]:
            self._asked += 1
            self._owned |= {out: self._alone(out) for out in call.outs if out is not None}
        return self._owned[value] if value in self._owned else self._alone(value)

    def _alone(self, value: int) -> Role | None:
        leaf = self.program.leaf(value)
        known = Role(leaf.role) if leaf is not None and leaf.role in set(Role) else None
        told = self.called.named(value) or known or self.role(value)
        return self.uses.role(value) if told is None and leaf is not None and not _PREDICTED.search(leaf.name or "") else told


def _is_epsilon(arg: Arg) -> bool:
    return isinstance(arg, float) and abs(arg) < _SMALL
