"""A statement of the source around a call, and what becomes of its text if one expression in it is written otherwise.

    Statement.of(site).operand(0)           the text `ref - logps` of `kl = torch.exp(ref - logps) - 1`
    statement.replaced({node: "…"})         the same lines, with nothing else changed

The source comes out of a file and is only parsed.
"""

from __future__ import annotations

import ast
import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import NamedTuple

from nanscope.program.calls import Site
from nanscope.program.spelling import ANY, ATOM, Phrase

Span = tuple[int, int, int, int]  # first line, its column in bytes, last line, the column after the end

NO_CODE = re.compile(r"""#.*|'[^']*'|"[^"]*\"""")  # what is no code in a line
_HEADS = re.compile(r"\s*(while|elif|else|except|finally|case|def|class|async|@|[-+*/%&|^.)\]}])")  # before such a line nothing is put
_OPEN = re.compile(r"([-+*/%&|^=,\\<>~]|\b(and|or|not|in|is|if|return|lambda))$")  # after such a line a statement goes on

_ATOMS = (ast.Name, ast.Attribute, ast.Call, ast.Subscript, ast.List, ast.Tuple)


@dataclass(frozen=True, slots=True)
class Statement:
    """The lines of a statement, or of as much of it as can be parsed by itself, and the call's expression in it.

    first: number of the first line. lines: their text. node: the expression. tree: what the lines are. shift: lines and columns, in bytes,
    by which positions in the tree are off. around: the lines that the file keeps before and after, by number. other: those of them that are
    no text of the file as it is.
    """

    first: int
    lines: tuple[str, ...]
    node: ast.expr | ast.AugAssign
    tree: ast.AST
    shift: tuple[int, int]
    around: Mapping[int, str]
    other: frozenset[int] = frozenset()

    @staticmethod
    def of(site: Site) -> Statement | None:
        """Return the statement around a call, None where the source is not there or cannot be parsed."""
        kept = dict(site.source)
        if site.line not in kept or not site.end_line:
            return None
        for first in takewhile(kept.__contains__, range(site.line, min(kept) - 1, -1)):  # a file may name any number
            for last in range(site.end_line, max(kept) + 1):
                if not all(number in kept for number in range(first, last + 1)):
                    break
                lines = tuple(kept[number] for number in range(first, last + 1))
                for tree, shift in _parsed(lines):
                    node = _at(tree, (site.line - first + 1 + shift[0], site.column - shift[1], site.end_line - first + 1 + shift[0]), site)
                    if node is not None:
                        return Statement(first, lines, node, tree, shift, kept, frozenset(site.other))
        return None

    def span(self, node: ast.expr | ast.AugAssign) -> Span:
        """Return where a node stands, in lines of the file and columns in bytes."""
        down, right = self.shift
        assert node.end_lineno is not None and node.end_col_offset is not None
        at = self.first - 1 - down
        return at + node.lineno, node.col_offset + right, at + node.end_lineno, node.end_col_offset + right

    def text(self, node: ast.expr | ast.AugAssign) -> Phrase:
        """Return an expression as it is written."""
        first, begin, last, end = self.span(node)
        lines = [line.encode() for line in self.lines[first - self.first : last - self.first + 1]]
        lines[-1] = lines[-1][:end]
        lines[0] = lines[0][begin:]
        parts = [part.decode(errors="replace") for part in lines]
        plain = isinstance(node, _ATOMS) or (isinstance(node, ast.Constant) and not isinstance(node.value, (int, float)))
        return Phrase("\n".join(parts), ATOM if plain else ANY)

    @property
    def writes(self) -> bool:
        """Does the expression change what it is called on?"""
        func = self.node.func if isinstance(self.node, ast.Call) else None
        return isinstance(self.node, ast.AugAssign) or (
            isinstance(func, ast.Attribute) and func.attr.endswith("_") and not func.attr.endswith("__")
        )

    @property
    def begins(self) -> bool:
        """May another statement be put before its first line: is that neither within brackets, nor the head of a loop or of a branch?"""
        code = {number: NO_CODE.sub("", line).rstrip() for number, line in self.around.items()}
        if _HEADS.match(code[self.first]):
            return False
        above = [code[number] for number in sorted(code) if number < self.first and code[number].strip()]
        depth = 0
        for line in reversed(above):
            for sign in reversed(line):
                depth += (sign in ")]}") - (sign in "([{")
                if depth < 0:
                    return False
        return not above or not _OPEN.search(above[-1])

    def binds(self, name: str) -> bool:
        """Does a part of the statement give a name a meaning of its own (`[f(x) for x in xs]`, `lambda x: f(x)`)?"""
        own = [node.args for node in ast.walk(self.tree) if isinstance(node, ast.Lambda)]
        arguments = {argument.arg for one in own for argument in (*one.posonlyargs, *one.args, *one.kwonlyargs)}
        loops = [node.target for node in ast.walk(self.tree) if isinstance(node, ast.comprehension)]
        return name in arguments | {node.id for loop in loops for node in ast.walk(loop) if isinstance(node, ast.Name)}

    def operands(self) -> list[ast.expr]:
        """Return the operands of the call's expression in the order in which the operator receives them."""
        node = self.node
        if isinstance(node, ast.AugAssign):
            return [node.target, node.value]
        if isinstance(node, ast.BinOp):
            return [node.left, node.right]
        if isinstance(node, ast.UnaryOp):
            return [node.operand]
        if isinstance(node, ast.Compare):
            return [node.left, *node.comparators]
        if isinstance(node, ast.Call):
            if any(isinstance(arg, ast.Starred) for arg in node.args):
                return []
            named = [keyword.value for keyword in node.keywords if keyword.arg in ("input", "other", "exponent")]
            receiver = (
                [node.func.value] if isinstance(node.func, ast.Attribute) else []
            )  # of `torch.exp(x)` a module, which nobody asks for
            return [*receiver, *node.args, *named]
        return [node.value] if isinstance(node, ast.Subscript) else []

    def calls_it(self, name: str) -> bool:
        """Does the expression itself say this operator, so that its operands are the operator's?"""
        node, bare = self.node, name.strip("_")
        if isinstance(node, (ast.BinOp, ast.AugAssign)):
            return _SIGNS.get(type(node.op)) in (bare, None)
        if isinstance(node, ast.UnaryOp):
            return True
        func = node.func if isinstance(node, ast.Call) else None
        said = func.attr if isinstance(func, ast.Attribute) else func.id if isinstance(func, ast.Name) else ""
        return said == bare or (said.strip("_"), bare) in _SAME

    def replaced(self, changes: Mapping[ast.expr | ast.AugAssign, Phrase]) -> tuple[str, ...] | None:
        """Return the lines with other texts for these nodes, None if that is no source any more."""
        text = "\n".join(self.lines).encode()
        starts = [0]
        for line in self.lines:
            starts.append(starts[-1] + len(line.encode()) + 1)
        pieces: list[_Piece] = []
        for node, new in changes.items():
            first, begin, last, end = self.span(node)
            pieces.append(_Piece(starts[first - self.first] + begin, starts[last - self.first] + end, new))
        whole = _rewritten(text, 0, len(text), pieces)
        lines = () if whole is None else tuple(whole.decode(errors="replace").split("\n"))
        return lines if lines and next(_parsed(lines), None) is not None else None


class _Piece(NamedTuple):
    """A stretch of a text, in bytes, and what is to stand there."""

    low: int
    high: int
    new: Phrase


def _rewritten(text: bytes, low: int, high: int, pieces: Sequence[_Piece]) -> bytes | None:
    """Return a stretch of a text with other pieces in it; None where one is a part of another, which does not say it once as it was."""
    found, at = b"", low
    inside = [piece for piece in pieces if low <= piece.low and piece.high <= high]
    for piece in sorted(inside, key=lambda one: (one.low, -one.high)):
        if piece.low < at:
            continue  # a part of the one before
        within = [one for one in inside if one is not piece and piece.low <= one.low and one.high <= piece.high]
        new = piece.new
        if within:
            was, now = text[piece.low : piece.high].decode(errors="replace"), _rewritten(text, piece.low, piece.high, within)
            if now is None or new.text.count(was) != 1:
                return None
            new = Phrase(new.text.replace(was, now.decode(errors="replace")), new.binds)
        begin, end, enclosed = _with_parentheses(text, piece.low, piece.high)
        if not (at <= begin and end <= high):
            begin, end, enclosed = piece.low, piece.high, None
        bare = enclosed is None and _stands_alone(text, begin, end)
        found += text[at:begin] + (new.text if bare else new.inside(ATOM)).encode()
        at = end
    return found + text[at:high]


def _parsed(lines: tuple[str, ...]) -> Iterator[tuple[ast.AST, tuple[int, int]]]:
    """Yield the lines as trees, each with how far its positions are off: as statements, as the head of one, as a part of an expression."""
    body = textwrap.dedent("\n".join(lines))
    indent = len(lines[0].encode()) - len(body.split("\n")[0].encode())
    for source, shift in (
        (body, (0, indent)),
        (f"{body} pass", (0, indent)),
        ("(\n" + "\n".join(lines) + "\n)", (1, 0)),
        ("f(\n" + "\n".join(lines) + "\n)", (1, 0)),
    ):
        try:
            yield ast.parse(source), shift
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            continue


def _at(tree: ast.AST, where: tuple[int, int, int], site: Site) -> ast.expr | ast.AugAssign | None:
    line, column, last = where
    end = site.end_column - (site.column - column)
    for node in ast.walk(tree):
        if not isinstance(node, (ast.expr, ast.AugAssign)):
            continue
        if (node.lineno, node.col_offset, node.end_lineno, node.end_col_offset) == (line, column, last, end):
            return node
    return None


def _with_parentheses(text: bytes, low: int, high: int) -> tuple[int, int, bool | None]:
    """The parentheses that stand directly around an expression belong to it, unless they are those of a call."""
    before, after = text[:low].rstrip(b" "), text[high:].lstrip(b" ")
    if not before.endswith(b"(") or not after.startswith(b")"):
        return low, high, None
    called = before[:-1][-1:]
    if called.isalnum() or called in (b"_", b")", b"]"):
        return low, high, None
    return len(before) - 1, len(text) - len(after) + 1, True


def _stands_alone(text: bytes, low: int, high: int) -> bool:
    """Is it an argument, or all that is bound or returned, so that no operator is beside it?"""
    before, after = text[:low].rstrip(), text[high:].lstrip()
    opened = before.endswith((b"(", b",", b"[")) or (before.endswith(b"=") and not before.endswith((b"==", b"!=", b"<=", b">=")))
    closed = not after or after.startswith((b")", b",", b"]", b"#")) or text[high:].startswith(b"\n")
    return (opened or before.endswith(b"return")) and closed


_SIGNS: dict[type[ast.operator], str] = {
    ast.Add: "add",
    ast.Sub: "sub",
    ast.Mult: "mul",
    ast.Div: "div",
    ast.Pow: "pow",
    ast.MatMult: "matmul",
}
_SAME = {  # as the code says it, as the operator is called
    ("norm", "linalg_vector_norm"), ("true_divide", "div"), ("divide", "div"), ("multiply", "mul"), ("subtract", "sub"), ("clip", "clamp"),
    ("logsigmoid", "log_sigmoid_forward"), ("absolute", "abs"), ("vector_norm", "linalg_vector_norm"), ("negative", "neg"),
    ("arccos", "acos"), ("arcsin", "asin"), ("arctanh", "atanh"), ("xlogy", "special_xlogy"), ("cosine_similarity", "linalg_vector_norm"),
}  # fmt: skip
