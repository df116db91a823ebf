"""What a function of the source knows at a place in it: which names are bound there, as far as its lines are kept.

    namespace.is_bound("mask", site)         handed over, or bound above
    namespace.words(call, 0, site)           "log_ratio", of `torch.exp(log_ratio)`

The source comes out of a file and is only parsed.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass

from nanscope.locate.names import Names
from nanscope.program.calls import Arg, Call, Ref, Site, refs, words_of
from nanscope.program.ops import COMMUTATIVE, COPIES
from nanscope.program.program import Program
from nanscope.replay.statement import NO_CODE


def alike(one: Site, other: Site) -> bool:
    """Do two calls stand in the same function?"""
    return (one.file, one.function) == (other.file, other.function)


@dataclass(frozen=True, slots=True)
class Namespace:
    """The functions of a program's source. names: what its values are called."""

    program: Program
    names: Names

    def words(self, call: Call, position: int, site: Site) -> str:
        """Return the text of a call's argument, "" where it is not certain: of `0.1 * x` the operator receives x first."""
        texts = words_of(call, site)
        if call.name in COMMUTATIVE and len(texts) == 2 and sum(isinstance(arg, Ref) for arg in call.args[:2]) == 1:
            told = [text for text in texts if self.is_called(call.args[position], text, site)]
            return told[0] if len(told) == 1 else ""
        return texts[position] if position < len(texts) else ""

    def is_called(self, arg: Arg, words: str, site: Site) -> bool:
        """Is an argument what the code calls so, though the code asks for something larger (`F.cross_entropy(logits, labels)`)?"""
        value = next(refs(arg), None)
        while value is not None:
            maker = self.program.maker(value)
            made = None if maker is None else self.program.site_of(maker)
            whole = maker is not None and len(maker.outs) == 1 and made != site
            if self.names.name(value) == words or (whole and made is not None and made.expression == words):
                return True
            value = next(maker.inputs(), None) if maker is not None and maker.name in COPIES else None
        return False

    def is_bound(self, root: str, site: Site) -> bool:
        """Does the function know the name before its statement, as far as its lines are there? Then it is handed over, or bound above."""
        lines = self._excerpt(site)
        code = {number: NO_CODE.sub("", line) for number, line in lines.items()}
        if not any(re.search(rf"\b{re.escape(root)}\b", line) for line in code.values()):
            return False
        binding = re.compile(rf"^\s*(?:[\w.]+\s*,\s*)*{re.escape(root)}\s*(?:,[^=]*)?(?::[^=]*)?=(?!=)")
        bound = [number for number, line in code.items() if binding.search(line)]
        return not bound or min(bound) < site.line

    def is_own(self, name: str, site: Site) -> bool:
        """Is a name certainly one of the function's own, a parameter or bound above, which it may therefore bind anew?"""
        code = {number: NO_CODE.sub("", line) for number, line in self._excerpt(site).items()}
        bound = re.compile(
            rf"^\s*(?:\w+\s*,\s*)*{re.escape(name)}\s*(?:,[^=(]*)?(?::[^=]*)?=(?!=)|^\s*for\b[^:]*\b{re.escape(name)}\b[^:]*\bin\b"
        )
        if any(bound.search(line) for number, line in code.items() if number < site.line):
            return True
        head = re.search(r"\bdef\s+\w+\s*\(([^()]*(?:\([^()]*\)[^()]*)*)\)", "\n".join(line for _, line in sorted(code.items())))
        return head is not None and re.search(rf"(^|,)\s*\*{{0,2}}{re.escape(name)}\s*($|[:=,])", head.group(1)) is not None

    def handed(self, site: Site, function: str) -> Iterator[str]:
        """What a function hands to another one of this name, as far as its lines are there."""
        for one in self.program.sites:
            if not alike(one, site) or not function:
                continue
            for _, line in one.source:
                found = re.search(rf"\b{re.escape(function)}\((.*)\)", line)
                try:
                    parsed = ast.parse(f"f({found.group(1)})", mode="eval").body if found else None
                except (SyntaxError, ValueError, RecursionError, MemoryError):
                    continue
                if isinstance(parsed, ast.Call):
                    yield from (
                        ast.unparse(arg)
                        for arg in [*parsed.args, *(keyword.value for keyword in parsed.keywords)]
                        if isinstance(arg, (ast.Name, ast.Attribute))
                    )

    def _excerpt(self, site: Site) -> dict[int, str]:
        """The lines of a function that the program keeps, by number, without those of its neighbours."""
        return {number: line for one in self.program.sites if alike(one, site) for number, line in _own(one)}


def _own(site: Site) -> Iterator[tuple[int, str]]:
    """The lines around a call that are its function's: up to where that begins, and down to where the next thing does."""
    kept = dict(site.source)
    inner = len(kept.get(site.line, "")) - len(kept.get(site.line, "").lstrip())
    for numbers in (range(site.line, max(kept, default=0) + 1), range(site.line - 1, min(kept, default=1) - 1, -1)):
        for number in numbers:
            line = kept.get(number, "")
            outside = number != site.line and line.strip() and len(line) - len(line.lstrip()) < inner
            begins = outside and re.match(r"\s*(async\s+def|def|class|@)\b|@", line) is not None
            if begins and number > site.line:
                break
            if outside and inner and line[:1].strip() and not begins and not line.startswith((")", "]", "}")):
                break
            yield number, line
            if begins:
                break


_PLAIN = (ast.Name, ast.Attribute, ast.Subscript, ast.Slice, ast.Constant, ast.Compare, ast.UnaryOp, ast.Tuple, ast.Call)
_METHODS = frozenset(("bool", "detach", "float", "long", "squeeze", "unsqueeze", "view"))  # by which a name stays what it is


def roots(words: str) -> set[str]:
    """The names that a plain expression is made of; none if it is anything else, or does something."""
    try:
        tree = ast.parse(words, mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return set()
    nodes = [node for node in ast.walk(tree) if isinstance(node, ast.expr)]
    calls = [node.func for node in nodes if isinstance(node, ast.Call)]
    if not all(isinstance(node, _PLAIN) for node in nodes) or not all(isinstance(f, ast.Attribute) and f.attr in _METHODS for f in calls):
        return set()
    return {node.id for node in nodes if isinstance(node, ast.Name)}
