"""What the values of a program are called and what they mean: by the rows of the framework whose function they lie in, then by their
names in the code, then by how they are computed."""

from __future__ import annotations

import ast
import re

from nanscope.frameworks.table import site_in
from nanscope.locate.uses import Uses
from nanscope.program.calls import Arg, Call, Computes, Ref, Site, refs
from nanscope.program.ops import (
    CLAMPS,
    COMMUTATIVE,
    COPIES,
    LOG_SOFTMAXES,
    NATURAL_EXPONENTIALS,
    NATURAL_LOGARITHMS,
    RESCALINGS,
    SCORE_KEEPERS,
    SETS,
    SUMS,
    TOPS,
    WRITES,
    Flow,
    carries,
    flow_of,
)
from nanscope.program.program import Program
from nanscope.roles import Role, last_word, role_of

LOG_PROBS = frozenset({Role.LOG_PROBS, Role.OLD_LOG_PROBS, Role.REF_LOG_PROBS, Role.ROLLOUT_LOG_PROBS})

_SPREAD = re.compile(r"(^|_)(std|sigma|var|variance|scale|alpha|temperature)($|_)")

_PLAIN = re.compile(r"""[A-Za-z_][\w.]*(\[["'][^"']+["']\])?""")

_NUMBER = re.compile(r"[-+]?[\d.][\w.+-]*|([A-Za-z_]\w*\.)*_?[A-Z][A-Z0-9_]+")  # 0.1 or a constant: VAE_SCALE, config.BETA


def _listed_as(word: str, items: tuple[Arg, ...], value: int) -> str:
    """What the code calls a value that it hands over in a list: `[a, batch["b"]]`."""
    try:
        parsed = ast.parse(word, mode="eval").body
    except (SyntaxError, ValueError, RecursionError):
        return ""
    words = [ast.unparse(item) for item in parsed.elts] if isinstance(parsed, (ast.List, ast.Tuple)) else []
    position = next((n for n, item in enumerate(items) if value in refs(item)), None)
    return words[position] if position is not None and len(words) == len(items) else ""


def _is_epsilon(arg: Arg) -> bool:
    return isinstance(arg, float) and abs(arg) < SMALL


SMALL = 1e-3  # what is added for the sake of a division or a logarithm


class Names:
    """What the values of a program are called and what they mean: by name first, then by how they are computed."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self._rows = [site_in(site.file, site.function) for site in program.sites]
        self._named: dict[int, Role | None] = {}  # a walk asks for the same value again and again
        self._owned: dict[int, Role | None] = {}
        self._asked = 0  # calls whose results are in it
        self.uses = Uses(program)

    def named(self, value: int) -> Role | None:
        """Return the role that a value's name tells: what the framework's row says of the function it lies in, else what the name says."""
        if value not in self._named:
            self._named[value] = self._listed(value) or role_of(self.name(value))
        return self._named[value]

    def _listed(self, value: int) -> Role | None:
        """The role of a value by the rows of a framework: as it is bound where it is made, or as it is called where it is read."""
        if not any(self._rows):
            return None
        index = self.program.producers.get(value)
        if index is not None:
            call = self.program.calls[index]
            row = self._rows[call.site] if call.site >= 0 else None
            bound = self.program.sites[call.site].name if row is not None and self._is_last(index) else None
            if row is not None and bound is not None:
                return self._corrected(row.role(last_word(bound)), value)
        for index in self.program.consumers.get(value, ()):
            call = self.program.calls[index]
            row = self._rows[call.site] if call.site >= 0 else None
            if row is None or (index > 0 and self.program.calls[index - 1].site == call.site):
                continue
            words = self.program.sites[call.site].args
            for position, arg in enumerate(call.args):
                if isinstance(arg, Ref) and arg.id == value and position < len(words) and _PLAIN.fullmatch(words[position]):
                    found = self._corrected(row.role(last_word(words[position])), value)
                    if found is not None:
                        return found
        return None

    def _is_last(self, index: int) -> bool:
        """Of several calls that one expression stands for, the last one is what gets bound."""
        return index == len(self.program.calls) - 1 or self.program.calls[index + 1].site != self.program.calls[index].site

    def _corrected(self, role: Role | None, value: int) -> Role | None:
        """A name is used for one thing after another: what e is raised to is no ratio yet, and what exp makes is no log-ratio any more."""
        if role is Role.RATIO and any(reader.name == "exp" for reader in self.program.readers(value)):
            return Role.LOG_RATIO
        return None if role is Role.LOG_RATIO and self._is_exponential(value) else role

    def _is_exponential(self, value: int) -> bool:
        made = self.program.maker(value)
        return made is not None and made.name in NATURAL_EXPONENTIALS

    def name(self, value: int) -> str | None:
        """Return the variable a value is bound to, None for an intermediate result."""
        leaf = self.program.leaf(value)
        if leaf is not None:
            listed = leaf.name is not None and leaf.name.startswith(("[", "("))  # `torch.cat([a, b])` reads one of them
            return (self._read_as(value) if listed else leaf.name) or self._copied_as(value) or self._handed_over(value)
        index = self.program.producers.get(value)
        if index is None:
            return None
        call = self.program.calls[index]
        site = self.program.site_of(call)
        if site is not None and site.name is not None and self._is_last(index):
            return site.name
        return self._read_as(value) or self._handed_over(value) or self._written_to(value)

    def _written_to(self, value: int) -> str | None:
        """What the code calls a tensor of which it has set an element: `scan[3, 7] = x` gives it no other name."""
        made = self.program.maker(value)
        site, wrote = None if made is None else made.site, False
        while made is not None and made.site == site and made.name in WRITES | COPIES:
            wrote = wrote or made.name in SETS
            value = next(made.inputs(), value)
            made = self.program.maker(value)
        return self.name(value) if wrote else None

    def _copied_as(self, value: int) -> str | None:
        """What an unnamed leaf is called further on, where it was only copied on its way: `batch.old_logps`, made by `torch.tensor`."""
        copy = self.program.only_copy(value)
        while copy is not None:
            if found := self.name(copy):
                return found
            copy = self.program.only_copy(copy)
        return None

    def _handed_over(self, value: int) -> str | None:
        """What the code calls the only thing that it hands to a module: in `self.first(x)` x arrives between a bias and a weight."""
        for call in self.program.readers(value):
            site, leaves = self.program.site_of(call), [leaf for read in call.inputs() if (leaf := self.program.leaf(read)) is not None]
            alone = all(leaf.is_of_model or leaf.id == value for leaf in leaves)
            if call.module and site is not None and alone and len(site.args) == 1 and _PLAIN.fullmatch(site.args[0]):
                return site.args[0]
        return None

    def _read_as(self, value: int) -> str | None:
        """What the code that reads a value calls it: a parameter's name, for what a caller passed without binding it."""
        for index in self.program.consumers.get(value, ()):
            call = self.program.calls[index]
            site = self.program.site_of(call)
            if site is None or (index > 0 and self.program.calls[index - 1].site == call.site):
                continue
            words = list(site.args)
            tensors = [arg for arg in call.args if isinstance(arg, Ref)]
            if call.name in COMMUTATIVE and len(tensors) == 1 and len(words) == 2:
                words = [word for word in words if role_of(word) is not None] or [word for word in words if not _NUMBER.fullmatch(word)]
                words = words if len(words) == 1 else []  # `0.1 * x` arrives as x, 0.1
            for position, arg in enumerate(call.args):
                word = words[position] if position < len(words) else ""
                if isinstance(arg, tuple):
                    word = _listed_as(word, arg, value)
                if value in refs(arg) and _PLAIN.fullmatch(word):
                    return word
        return None

    def _read_role(self, value: int) -> Role | None:
        """The role that a leaf has for the code that reads it, by whatever name it passes on the way."""
        stack = [value]
        for _ in range(12):
            if not stack:
                break
            current = stack.pop(0)
            for call in self.program.readers(current):
                site = self.program.site_of(call)
                for position, arg in enumerate(call.args):
                    if site is not None and isinstance(arg, Ref) and arg.id == current and position < len(site.args):
                        role = role_of(site.args[position])
                        if role is not None:
                            return role
                if carries(call.op):
                    stack += [out for out in call.outs if out is not None]
        return None

    def says_mask(self, value: int) -> bool:
        """Is this value called a mask, or made from nothing but a value that is?"""
        for _ in range(20):
            if self.named(value) is Role.MASK:
                return True
            call = self.program.maker(value)
            inputs = list(call.inputs()) if call is not None else []
            if call is None or len(inputs) != 1 or not (carries(call.op) or call.name == "bitwise_not"):
                return False
            value = inputs[0]
        return False

    def role(self, value: int, via: int | None = None) -> Role | None:
        """Return what a value means, None if neither its name nor its computation tells. via: the value to look downstream from.

        The surest witness speaks first: a name; what was noted where the program was cut; the computation; who reads it; and last what
        stands around it in the source, which may be about something else.
        """
        named, made = self.named(value), self.program.maker(value)
        if named is Role.REWARDS and made is not None and made.module:
            named = Role.ATTENTION  # inside a model scores are those of attention
        if named is Role.LOG_RATIO and self._is_exponential(value):
            named = None  # a name that is used for one thing after another
        if named is Role.LOG_PROBS:
            return self.uses.role(value) or named  # of whose policy, the loss knows better than a name that does not say
        if named is not None:
            return named
        if (leaf := self.program.leaf(value)) is not None and leaf.role in set(Role):
            return Role(leaf.role)
        computed = self._computed(value)
        if computed is Role.LOG_RATIO and made is not None and made.name in SUMS:
            site = self.program.site_of(made)
            return Role.KL if site is not None and role_of(site.within) is Role.KL else computed  # their mean estimates it
        if computed is not None:
            return computed
        if made is None:
            return self._read_role(value) or self.uses.role(value) or self._downstream(value)
        site = self.program.site_of(made)
        if made.module:  # before the source is asked: a layer is called anything, and what it makes is an activation
            return Role.WEIGHTS if self._of_weights_only(value) else self.inside(site, made.module, self._ancestors(value))
        if site is None:
            return self._downstream(value)
        callee = role_of(site.expression.partition("(")[0]) if site.expression.endswith(")") else None
        if callee in (Role.KL, Role.ENTROPY):
            return callee  # `F.kl_div(…)`
        function = role_of(site.function.rsplit(".", 1)[-1])
        # everything is in the end part of a loss: a function of that name says nothing of a value in it
        around = role_of(site.within) or (function if function not in (Role.LOSS, Role.GRAD, Role.MASK) else None)
        return around or self._downstream(value if via is None else via)

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
        return next((role for role in named if role in (Role.LOGITS, Role.LOSS, Role.LOG_PROBS)), Role.HIDDEN)

    def _computed(self, value: int) -> Role | None:
        """The role that the computation of a value tells: copies keep it, and some calls make one role of another."""
        call = self.program.maker(value)
        if call is None:
            return None
        name, inputs = call.name, list(call.inputs())
        if carries(call.op) or name == "neg" or (name == "add" and len(inputs) == 1 and _is_epsilon(call.args[-1])):
            return self._own(inputs[0]) if inputs else None
        if name == "sub" and len(inputs) == 2 and self._is_top_of(inputs[1], inputs[0]):
            return Role.LOGITS  # shifted by their largest, as a softmax does
        first = self._own(inputs[0]) if inputs and not call.module else None
        if first in (Role.REWARDS, Role.ADVANTAGES) and name in SCORE_KEEPERS:
            return first
        if (name in SUMS or name in RESCALINGS) and (first in LOG_PROBS or first is Role.LOG_RATIO) and self._is_of_tokens(call):
            return first  # of a sequence, or what a mask leaves of it, or its mean over tokens
        if name == "sub" and len(inputs) == 2:
            return Role.LOG_RATIO if {self._own(v) for v in inputs} <= LOG_PROBS else None
        if name in NATURAL_EXPONENTIALS and inputs:
            return self._exponential(call, value, inputs[0])
        if name in LOG_SOFTMAXES or name == "logsumexp":
            return Role.LOG_PROBS
        if name in NATURAL_LOGARITHMS and self._is_ratio(inputs[0]):
            return Role.LOG_RATIO
        if name in NATURAL_LOGARITHMS and first is Role.IS_WEIGHT:
            return first
        if name in NATURAL_LOGARITHMS and LOG_PROBS & self._ancestors(inputs[0]):
            return Role.LOG_PROBS
        if name in RESCALINGS and inputs and role_of(self.name(inputs[0])) is Role.LOGITS:
            return Role.LOGITS  # scaled, by a temperature
        return None

    def _is_of_tokens(self, call: Call) -> bool:
        """Is it a sum, or a product or a quotient with a mask, or with the number of tokens that one selects?"""
        others = [value for value in list(call.inputs())[1:] if value != next(call.inputs())]
        return call.name in SUMS or (len(others) == 1 and self._counts(others[0]))

    def _counts(self, value: int) -> bool:
        call = self.program.maker(value)
        while call is not None and (call.name in SUMS or call.name in CLAMPS or carries(call.op)) and not self.says_mask(value):
            value = next(call.inputs(), -1)
            call = self.program.maker(value)
        return self.says_mask(value)

    def _is_ratio(self, value: int) -> bool:
        """Is it a ratio, or the sum of some?"""
        call = self.program.maker_behind(value, SUMS)
        made = None if call is None or call.name not in NATURAL_EXPONENTIALS else call.outs[0]
        return made is not None and self._own(made) is Role.RATIO

    def _exponential(self, call: Call, value: int, operand: int) -> Role | None:
        """What e to the power of something is."""
        if self.uses.less_its_operand(call):
            return Role.KL
        if self._own(operand) is Role.LOG_RATIO:
            return Role.KL if Role.REF_LOG_PROBS in self._ancestors(operand) else Role.RATIO
        if call.name != "exp":
            return None
        if self._of_weights_only(value):
            return Role.WEIGHTS  # a temperature or a deviation that is learnt
        if _SPREAD.search((self.name(operand) or "").lower()):
            return Role.HIDDEN  # a standard deviation or scale that a policy puts out
        if not call.module and self._is_score(operand):
            return Role.LOGITS  # of similarities: numerator and denominator of a softmax by hand
        if not call.module and self._downstream(value) in (None, Role.LOSS, Role.ADVANTAGES):
            return Role.RATIO  # what a loss raises e to and calls by no name of ours weighs its tokens
        return None

    def _is_score(self, value: int) -> bool:
        """Is it a product of matrices, scaled as it may be?"""
        call = self.program.maker_behind(value, RESCALINGS)
        return call is not None and flow_of(call.op) is Flow.MATMUL

    def _is_top_of(self, value: int, content: int) -> bool:
        """Is a value the largest of some others, exactly or smoothly?"""
        made = self.program.maker(value)
        return made is not None and made.name in TOPS and content in set(made.inputs())

    def _of_weights_only(self, value: int) -> bool:
        """Is a value computed from parameters alone, without a single activation?"""
        stack, seen = [value], set[int]()
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
        return not stack

    def _own(self, value: int) -> Role | None:
        """The role of a value by itself, whatever stands around it. Each is told once, what a program makes first before the rest."""
        for call in self.program.calls[self._asked : self.program.producers.get(value, -1) + 1]:
            self._asked += 1
            self._owned |= {out: self._alone(out) for out in call.outs if out is not None}
        return self._owned[value] if value in self._owned else self._alone(value)

    def _alone(self, value: int) -> Role | None:
        leaf = self.program.leaf(value)
        known = Role(leaf.role) if leaf is not None and leaf.role in set(Role) else None
        told = self.named(value) or known or self._computed(value)
        return self.uses.role(value) if told is None and leaf is not None else told

    def _ancestors(self, value: int) -> set[Role]:
        """The roles that names tell of what a value is made of; log-probs are where a loss begins, so not beyond them."""
        found: set[Role] = set()
        stack = [value]
        for _ in range(40):
            if not stack:
                break
            current = stack.pop()
            role = self.named(current)
            if role is not None:
                found.add(role)
            made = self.program.maker(current)
            if made is not None and role not in LOG_PROBS:
                stack.extend(made.inputs())
        return found

    def _downstream(self, value: int) -> Role | None:
        """The role of the first named value that this one goes into."""
        for _ in range(60):
            readers = self.program.readers(value)
            if not readers:
                ends = Role.LOSS if self.program.computes is Computes.LOSS else Role.HIDDEN  # what is handed to a model, or comes out of it
                return ends if value == self.program.output else None
            if readers[0].module:
                return Role.HIDDEN  # a model is given it: what becomes of its outputs says nothing of that
            called = self._called_by(readers[0], value)
            value = next((out for out in readers[0].outs if out is not None), value)
            role = called or self.named(value)
            if role is not None and role is not Role.MASK:
                return role
        return None

    def _called_by(self, reader: Call, value: int) -> Role | None:
        """The role that the code which reads a value tells: a loss may call it by another name than who has made it."""
        site = self.program.site_of(reader)
        for position, arg in enumerate(reader.args):
            if site is not None and isinstance(arg, Ref) and arg.id == value and position < len(site.args):
                return role_of(site.args[position]) if _PLAIN.fullmatch(site.args[position]) else None
        return None
