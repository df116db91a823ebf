"""What a function of the source knows at a place in it: which names are bound there, as far as its lines are kept.

    namespace.is_bound("mask", site)         handed over, or bound above
    namespace.words(call, 0, site)           "log_ratio", of `torch.exp(log_ratio)`

The source comes out of a file and is only parsed.
"""

from __future__ import annotations

import ast
import re
import textwrap
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import TypeAlias

from nanscope.locate.names import Names
from nanscope.program.calls import Arg, Call, Ref, Site, refs, words_of
from nanscope.program.ops import COMMUTATIVE, COPIES
from nanscope.program.program import Program


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
            arg = call.args[position]
            told = [text for text in texts if self.is_called(arg, text, site) or _says(text, arg)]
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

    def is_bound(self, root: str, site: Site, made: int | None = None) -> bool:
        """Does the function know a name before its statement, as far as its lines are there, and for no other value than is meant?

        made: the line on which that was made, None where it came in.
        """
        seen = self._seen(root, site)
        if seen.declared or (seen.after and not seen.before and not seen.parameter):
            return False
        if not seen.before:
            return seen.parameter or seen.read
        first, last, certain = seen.before[-1]
        if made is not None and first <= made <= last:
            return certain
        return certain and len(seen.before) == 1 and not seen.parameter

    def is_own(self, name: str, site: Site) -> bool:
        """Is a name certainly one of the function's own, a parameter or bound above, which it may therefore bind anew?"""
        seen = self._seen(name, site)
        return not seen.declared and (seen.parameter or seen.own)  # the statement has read it, so it was bound

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

    def _seen(self, name: str, site: Site) -> _Seen:
        """What a name is in the lines of a function that are kept."""
        lines, chunks = _within(self._excerpt(site), site)
        body = min((_indent(line) for number, line in lines.items() if line.strip() and not _HEAD.match(line)), default=0)
        found = _Seen([], [], False, False, False, False)
        for tree, shift, indent in chunks:
            function = _function(tree, site, shift, lines)
            if function is None and site.function.endswith("<lambda>"):
                continue  # what stands around it is another function's
            known = function is not None or _is_around(lines, shift + 1, indent, site.line)
            found.parameter |= function is not None and name in _parameters(function)
            here = _path(tree, site.line - shift)
            for node, certain in _bindings(
                function.body if function is not None else tree.body, name, here, known and (indent == body or function is not None)
            ):
                first, last = node.lineno + shift, (node.end_lineno or node.lineno) + shift
                if lines.get(last, "").rstrip().endswith(","):
                    continue  # an argument by its name, of a call that begins above what is kept
                if isinstance(node, (ast.Global, ast.Nonlocal)):
                    found.declared = True
                elif last < site.line:
                    found.before.append((first, last, certain))
                    found.own |= known
                else:
                    found.after.append(first)
            scope = function if function is not None else tree
            found.read |= known and any(isinstance(node, ast.Name) and node.id == name for node in _inside(scope))
        found.before.sort()
        return found

    def _excerpt(self, site: Site) -> dict[int, str]:
        """The lines of a function that the program keeps, by number, without those of its neighbours."""
        return {number: line for one in self.program.sites if alike(one, site) for number, line in _own(one)}


@dataclass
class _Seen:
    """before: first and last line of the statements above that bind a name, and whether one of them is certainly run before; after: lines
    of the others. own: one above is certainly the function's. parameter: of the function. declared: global or nonlocal. read: anywhere
    in it."""

    before: list[tuple[int, int, bool]]
    after: list[int]
    own: bool
    parameter: bool
    declared: bool
    read: bool


_HEAD = re.compile(r"\s*(async\s+def|def|class|@|#)")
_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)
_Function: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
_Chunk: TypeAlias = tuple[ast.Module, int, int]  # how far its line numbers are off, and its indentation


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())


def _chunks(lines: Mapping[int, str]) -> Iterator[_Chunk]:
    """Yield what can be parsed of the lines."""
    runs: list[list[int]] = []
    for number in sorted(lines):
        if not runs or number != runs[-1][-1] + 1:
            runs.append([])
        runs[-1].append(number)
    for run in runs:
        while run:
            size, tree = _longest([lines[number] for number in run])
            if tree is not None:
                yield tree, run[0] - 1, min((_indent(lines[number]) for number in run[:size] if lines[number].strip()), default=0)
            run = run[size:]


def _longest(lines: Sequence[str]) -> tuple[int, ast.Module | None]:
    """How many lines can be parsed together, from the first on, and what they are; the first alone if none can."""
    for size in range(len(lines), 0, -1):
        tree = _module(lines[:size])
        if tree is not None:
            return size, tree
    return 1, None


def _module(lines: Sequence[str]) -> ast.Module | None:
    try:
        return ast.parse(textwrap.dedent("\n".join(lines)))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _within(lines: dict[int, str], site: Site) -> tuple[dict[int, str], list[_Chunk]]:
    """The lines that may be a call's function's, and what can be parsed of them: where its head is kept, from there to where it ends."""
    chunks = list(_chunks(lines))
    found = [
        (function.lineno + shift, _last(function, shift, lines))
        for tree, shift, _ in chunks
        if (function := _function(tree, site, shift, lines))
    ]
    first, last = max(found, default=(min(lines, default=0), max(lines, default=0)))
    kept = {number: line for number, line in lines.items() if first <= number <= last}
    return kept, chunks if len(kept) == len(lines) else list(_chunks(kept))


def _function(tree: ast.Module, site: Site, shift: int, lines: Mapping[int, str]) -> _Function | None:
    """The function of a call, if its head is there: of this name, around the call or above it, the nearest one that may go on so far."""
    name = site.function.rpartition(".")[2]
    heads: list[_Function] = [
        node
        for node in ast.walk(tree)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
        and (name == "<lambda>" if isinstance(node, ast.Lambda) else node.name == name)
        and node.lineno + shift <= site.line <= _last(node, shift, lines)
    ]
    return max(heads, key=lambda node: (node.lineno, node.col_offset), default=None)


def _last(function: _Function, shift: int, lines: Mapping[int, str]) -> int:
    """The last line that may be a function's: where its body stands beside its head, that of the body, else the one before a line that is
    as far out as the head, or further."""
    end = (function.end_lineno or function.lineno) + shift
    if isinstance(function, ast.Lambda):
        return end
    begins, head = function.body[0], _indent(lines[function.lineno + shift])
    if _indent(lines[begins.lineno + shift]) - head != begins.col_offset - function.col_offset:
        return end
    beyond = (number - 1 for number in sorted(lines) if number > end and _code(lines[number]) and _indent(lines[number]) <= head)
    return next(beyond, max(lines))


def _is_around(lines: Mapping[int, str], first: int, indent: int, line: int) -> bool:
    """May what begins on a line be the code around the call's line, so that no block ends or begins between them? The end of a block whose
    head is not kept may be that of another function."""
    low, high = min(first, line), max(first, line)
    return all(_indent(text) >= indent for number, text in lines.items() if low <= number <= high and _code(text))


def _code(line: str) -> str:
    """A line without a comment that is all of it."""
    return "" if line.lstrip().startswith("#") else line.strip()


def _parameters(function: _Function) -> set[str]:
    given = function.args
    rest = [one for one in (given.vararg, given.kwarg) if one is not None]
    return {one.arg for one in (*given.posonlyargs, *given.args, *given.kwonlyargs, *rest)}


def _path(tree: ast.AST, line: int) -> set[ast.AST]:
    """The statements around a line."""
    return {node for node in ast.walk(tree) if isinstance(node, ast.stmt) and node.lineno <= line <= (node.end_lineno or node.lineno)}


def _bindings(body: object, name: str, here: Container[ast.AST], certain: bool) -> Iterator[tuple[ast.stmt, bool]]:
    """Yield the statements of a function that bind a name, or delete it, each with whether it is certainly run before a line around which
    stand the statements `here`."""
    for node in body if isinstance(body, list) else ():
        if isinstance(node, _SCOPES):
            if not isinstance(node, ast.Lambda) and node.name == name:
                yield node, certain
            continue
        inner = [getattr(node, part, []) for part in ("body", "orelse", "finalbody")]
        inner += [one.body for part in ("handlers", "cases") for one in getattr(node, part, [])]
        if isinstance(node, (ast.Global, ast.Nonlocal)):
            if name in node.names:
                yield node, True
        elif any(inner):
            if _binds(_without(node, inner), name):
                yield node, False  # the target of a loop, or what a case matches
            for block in inner:
                around = any(one in here for one in block)
                always = certain and (around or isinstance(node, (ast.With, ast.AsyncWith)))
                yield from _bindings(block, name, here, always)
        elif _binds(ast.walk(node), name):
            plain = isinstance(node, (ast.Assign, ast.AnnAssign, ast.Import, ast.ImportFrom)) and not _conditional(node, name)
            yield node, certain and plain


def _without(node: ast.stmt, blocks: Sequence[Sequence[ast.AST]]) -> Iterator[ast.AST]:
    """The parts of a statement but for its blocks."""
    inside = {id(part) for block in blocks for one in block for part in ast.walk(one)}
    return (part for part in ast.walk(node) if id(part) not in inside)


def _binds(nodes: Iterable[ast.AST], name: str) -> bool:
    return any(
        (isinstance(node, ast.Name) and node.id == name and not isinstance(node.ctx, ast.Load))
        or (isinstance(node, ast.alias) and (node.asname or node.name.partition(".")[0]) == name)
        or (isinstance(node, (ast.MatchAs, ast.MatchStar)) and node.name == name)
        or (isinstance(node, ast.ExceptHandler) and node.name == name)
        for node in nodes
    )


def _conditional(node: ast.stmt, name: str) -> bool:
    """Does the statement bind a name within an expression, which may not be reached, or delete it?"""
    return any(
        (isinstance(part, ast.NamedExpr) and part.target.id == name) or (isinstance(part, ast.Name) and isinstance(part.ctx, ast.Del))
        for part in ast.walk(node)
    )


def _inside(scope: ast.AST) -> Iterator[ast.AST]:
    """The nodes of a function, without those of the functions in it."""
    for child in ast.iter_child_nodes(scope):
        if not isinstance(child, _SCOPES):
            yield child
            yield from _inside(child)


def _own(site: Site) -> Iterator[tuple[int, str]]:
    """The lines around a call that are its function's: up to where that begins, and down to where the next thing does."""
    kept = dict(site.source)
    inner = len(kept.get(site.line, "")) - len(kept.get(site.line, "").lstrip())
    for numbers in (range(site.line, max(kept, default=0) + 1), range(site.line - 1, min(kept, default=1) - 1, -1)):
        for number in takewhile(lambda number: number in kept or number == site.line, numbers):  # a file may name any number
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


def _says(text: str, arg: Arg) -> bool:
    """Is a text of the source this very number?"""
    try:
        return isinstance(arg, (int, float)) and bool(ast.literal_eval(text) == arg)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return False
