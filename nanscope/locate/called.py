"""What the values of a program are called: by the rows of the framework whose function they lie in, then by their names in the code."""

from __future__ import annotations

import ast
import re
from functools import cached_property

from nanscope.frameworks.table import site_in
from nanscope.locate.uses import Uses
from nanscope.program.calls import Arg, Call, Ref, Site, refs, words_of
from nanscope.program.ops import COMMUTATIVE, COPIES, NATURAL_EXPONENTIALS, SETS, WRITES, carries
from nanscope.program.program import Program
from nanscope.roles import LOG_PROBS, Role, in_words, last_word, role_of

_SCORE = re.compile(r"(^|_)scores?($|_)")
_GENERATIVE = re.compile(r"score_?match|denois|diffus|langevin|(^|[_.])(dsm|ddpm|sde)($|[_.])")

_DETECTING = re.compile(r"(^|_)(bbox(es)?|box(es)?|anchors?|g?ious?)($|_)")

_OVERLAP = re.compile(r"(^|[_.])(dice|jaccard|tversky)($|[_.])")

_PLAIN = re.compile(r"""[A-Za-z_][\w.]*(\[["'][^"']+["']\])?""")

_NUMBER = re.compile(r"[-+]?[\d.][\w.+-]*|([A-Za-z_]\w*\.)*_?[A-Z][A-Z0-9_]+")  # 0.1 or a constant: VAE_SCALE, config.BETA

_COEFFICIENT = re.compile(
    r"(^|_)(alpha|beta|coeff?s?|coefficients?|decay|eps(ilon)?|factor|gamma|lambda|lr|scale|tau|temp(erature)?)$", re.IGNORECASE
)

_OF_CLASSES = frozenset({Role.KL, Role.ENTROPY, Role.ATTENTION, Role.ROUTER})


def _unpacked(name: str, position: int) -> str | None:
    """What the code calls one of several results: `values, indices = x.max(-1)`."""
    try:
        parsed = ast.parse(name, mode="eval").body
    except (SyntaxError, ValueError, RecursionError):
        return name
    if not isinstance(parsed, (ast.List, ast.Tuple)) or any(isinstance(item, ast.Starred) for item in parsed.elts):
        return name
    return ast.unparse(parsed.elts[position]) if position < len(parsed.elts) else None


class Called:
    """What the values of a program are called, and the roles that this tells."""

    def __init__(self, program: Program, uses: Uses) -> None:
        self.program, self.uses = program, uses
        self._rows = [site_in(site.file, site.function) for site in program.sites]
        self._begun: dict[int, tuple[int, bool]] = {}
        self._named: dict[int, Role | None] = {}  # a walk asks for the same value again and again

    def named(self, value: int) -> Role | None:
        """Return the role that a value's name tells: what the framework's row says of the function it lies in, else what the name says."""
        if value not in self._named:
            name = self.name(value)
            role = self._listed(value) or role_of(name)
            if role is Role.MASK and self.uses.carried(value):
                role = None  # what has a gradient says how much, and not which: `keep = -F.logsigmoid(margin)`
            self._named[value] = self._scored(role, name)
        return self._named[value]

    def _scored(self, role: Role | None, name: str | None) -> Role | None:
        """The role that a name tells in this loss, where it calls something a score."""
        if role is not Role.REWARDS or not _SCORE.search(name or ""):
            return role
        return Role.HIDDEN if self._of_data else Role.LOSS if self._of_overlap else role

    @cached_property
    def _of_data(self) -> bool:
        """Is it a loss of a generative model, whose scores are gradients of a log-density, or of a detector, which scores what it sees?"""
        sites = self.program.sites
        return any(_GENERATIVE.search(site.function.lower()) or _DETECTING.search((site.name or "").lower()) for site in sites)

    @cached_property
    def _of_overlap(self) -> bool:
        """Is it a loss of segmentation, less the better two regions overlap?"""
        return any(_OVERLAP.search(in_words(site.function)) for site in self.program.sites)

    def _listed(self, value: int) -> Role | None:
        """The role of a value by the rows of a framework: as it is bound where it is made, or as it is called where it is read."""
        if not any(self._rows):
            return None
        index = self.program.producers.get(value)
        if index is not None:
            call = self.program.calls[index]
            row = self._rows[call.site] if call.site >= 0 else None
            bound = self.program.sites[call.site].name if row is not None and self.is_last(index) else None
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

    def is_last(self, index: int) -> bool:
        """Of several calls that one expression stands for, the last one is what gets bound."""
        return index == len(self.program.calls) - 1 or self.program.calls[index + 1].site != self.program.calls[index].site

    def _is_divided(self, index: int) -> bool:
        """Is it what torch makes of `1.0 / x`, a reciprocal that is multiplied by 1?"""
        call, following = self.program.calls[index], self.program.calls[index + 1]
        return call.name == "reciprocal" and following.site == call.site and following.args == (Ref(call.outs[0] or 0), 1)

    def _corrected(self, role: Role | None, value: int) -> Role | None:
        """A name is used for one thing after another: what e is raised to is no ratio yet, and what exp makes is no log-ratio any more."""
        if role is Role.RATIO and any(reader.name == "exp" for reader in self.program.readers(value)):
            return Role.LOG_RATIO
        return None if role is Role.LOG_RATIO and self.is_exponential(value) else role

    def is_exponential(self, value: int) -> bool:
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
        if site is not None and site.name is not None and (self.is_last(index) or self._is_divided(index)):
            return _unpacked(site.name, call.outs.index(value)) if len(call.outs) > 1 else site.name
        return self._read_as(value) or self._handed_over(value) or self._written_to(value)

    def _written_to(self, value: int) -> str | None:
        """What the code calls a tensor of which it has set an element: `scan[3, 7] = x` gives it no other name."""
        begun, wrote = self._before_writes(value)
        return self.name(begun) if wrote else None

    def _before_writes(self, value: int) -> tuple[int, bool]:
        """The value that a line has begun with which sets elements again and again, and whether it does. Of a long one each is
        asked for."""
        way, end = list[tuple[int, bool]](), (value, False)
        made = self.program.maker(value)
        site = None if made is None else made.site
        while made is not None and made.site == site and made.name in WRITES | COPIES:
            if (known := self._begun.get(end[0])) is not None:
                end = known
                break
            way.append((end[0], made.name in SETS))
            end = next(made.inputs(), -1), False  # a file may hold a copy of nothing
            made = self.program.maker(end[0])
        for one, sets in reversed(way):
            end = self._begun[one] = end[0], end[1] or sets
        return end

    def _copied_as(self, value: int) -> str | None:
        """What an unnamed leaf is called further on, where it was only copied on its way: `batch.old_logps`, made by `torch.tensor`."""
        copy = self.program.only_copy(value)
        while copy is not None:
            if found := self.name(copy):
                return found
            copy = self.program.only_copy(copy)
        return None

    def _handed_over(self, value: int) -> str | None:
        """What the code calls the only thing that it hands to a module: in `self.first(x)` x arrives between a bias and a weight. What the
        module has made by then is none of it."""
        made, leaf = self.program.maker(value), self.program.leaf(value)
        if leaf is not None and leaf.is_of_model:
            return None
        for call in self.program.readers(value):
            if made is not None and made.site == call.site:
                continue
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
            words = self._words(call)
            for position, arg in enumerate(call.args):
                word = words[position] if position < len(words) else ""
                if isinstance(arg, tuple):
                    word = _listed_as(word, arg, value)
                if value in refs(arg) and _PLAIN.fullmatch(word):
                    return word
        return None

    def _words(self, call: Call) -> list[str]:
        """What the code calls the arguments of a call, in its order."""
        site, tensors = self.program.site_of(call), [arg for arg in call.args if isinstance(arg, Ref)]
        words = [] if site is None else list(words_of(call, site))
        if len(words) != 2 or len(tensors) != 1 or call.name not in COMMUTATIVE:
            return words
        made = self.program.maker(tensors[0].id)
        if made is not None and made.name == "reciprocal" and made.site == call.site:
            return []  # and 0.1 times that
        words = [word for word in words if not _NUMBER.fullmatch(word)]
        words = [word for word in words if not _COEFFICIENT.search(last_word(word))] or words
        words = [word for word in words if role_of(word) is not None] or words
        return words if len(words) == 1 else []  # `0.1 * x` arrives as x, 0.1

    def read_role(self, value: int) -> Role | None:
        """The role that a leaf has for the code that reads it, by whatever name it passes on the way."""
        stack = [value]
        for _ in range(12):
            if not stack:
                break
            current = stack.pop(0)
            for call in self.program.readers(current):
                words = self._words(call)
                for position, arg in enumerate(call.args):
                    if isinstance(arg, Ref) and arg.id == current and position < len(words):
                        role = role_of(words[position])
                        if role is not None:
                            return role
                if carries(call.op):
                    stack += [out for out in call.outs if out is not None]
        return None

    def called_by(self, reader: Call, value: int) -> Role | None:
        """The role that the code which reads a value tells: a loss may call it by another name than who has made it."""
        words = self._words(reader)
        for position, arg in enumerate(reader.args):
            if isinstance(arg, Ref) and arg.id == value and position < len(words):
                return self._scored(role_of(words[position]), words[position]) if _PLAIN.fullmatch(words[position]) else None
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

    def ancestors(self, value: int) -> set[Role]:
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


def around(site: Site) -> Role | None:
    """The role that the function of a call tells, or else its class.

    Everything is in the end part of a loss: a function of that name says nothing of a value in it. Of a class only what has no other
    business is believed: a `RewardTrainer` computes anything, a `KLController` nothing but the divergence.
    """
    function, *owners = [part for part in reversed(site.function.split(".")) if part != "<locals>"]
    found = role_of(function)
    if found is not None and found not in (Role.LOSS, Role.GRAD, Role.MASK):
        return found
    return next((role for role in map(role_of, owners) if role in _OF_CLASSES), None)


def _listed_as(word: str, items: tuple[Arg, ...], value: int) -> str:
    """What the code calls a value that it hands over in a list: `[a, batch["b"]]`."""
    try:
        parsed = ast.parse(word, mode="eval").body
    except (SyntaxError, ValueError, RecursionError):
        return ""
    words = [ast.unparse(item) for item in parsed.elts] if isinstance(parsed, (ast.List, ast.Tuple)) else []
    position = next((n for n, item in enumerate(items) if value in refs(item)), None)
    return words[position] if position is not None and len(words) == len(items) else ""
