"""From a code position to words: the line, the call's expression, and the variable that it is bound to.

Runs only when a step is looked at. CPython keeps the exact columns of every instruction, so of two calls on one line the right one
is named.
"""

from __future__ import annotations

import ast
import inspect
import linecache
import re
from collections.abc import Callable, Mapping
from functools import lru_cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from torch import Tensor, distributions
from torch.distributions import Distribution

from nanscope.program.calls import Site

CONTEXT = 4  # lines of source kept above and below the statement
LONGEST = 400  # characters of one expression
SITES = 4096  # positions that are remembered


_ASKING = frozenset(("locals", "vars", "exec", "eval", "dir"))


def is_open(code: CodeType) -> bool:
    """May the variables of a running function be looked at?

    Before Python 3.13 `locals()` is one mapping for the function and for whoever looks at its frame, and looking brings it up to date: what
    a trainer took from it at its first line would change.
    """
    return not code.co_flags & inspect.CO_OPTIMIZED or _ASKING.isdisjoint(code.co_names)


def variables(frame: FrameType) -> Mapping[str, Any]:
    """Return the variables of a frame, none if it is not open."""
    return frame.f_locals if is_open(frame.f_code) else {}


Key = tuple[str, CodeType | None, int]  # a file, a function in it, and its instruction


def apart(code: CodeType | None, lasti: int) -> Key:
    """Return a position as a key. The code of a copied file equals that of the first one: the name of the file tells them apart."""
    return code.co_filename if code is not None else "", code, lasti


@lru_cache(maxsize=64)
def _tree(file: str) -> ast.Module | None:
    try:
        return ast.parse("".join(linecache.getlines(file)))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


@lru_cache(maxsize=64)
def _bytes(file: str) -> tuple[bytes, ...] | None:
    """The lines of a file as they are, and what stands after the last line feed; None where there is no file, as of a notebook's cell."""
    try:
        return tuple(Path(file).read_bytes().split(b"\n"))
    except (OSError, ValueError):
        return None


def site_of(code: CodeType, lasti: int) -> Site:
    """Return the source position of an instruction, with names where the source file can be read."""
    known = _sites.get((id(code), lasti))
    if known is None:
        if len(_sites) >= SITES:
            _sites.clear()
        known = _sites[id(code), lasti] = code, _site(code.co_filename, code, lasti)
    return known[1]


# By identity, and then by what is equal: to hash a function takes as long as it is, and is done in every step for every call of its own.
_sites: dict[tuple[int, int], tuple[CodeType, Site]] = {}


@lru_cache(maxsize=SITES)
def _site(file: str, code: CodeType, lasti: int) -> Site:
    """The position in this file: the code of a copied file equals that of the first one."""
    positions = list(code.co_positions())
    line, end_line, column, end_column = positions[lasti // 2] if 0 <= lasti // 2 < len(positions) else (None,) * 4
    line = line or code.co_firstlineno
    end_line = end_line or line
    plain = Site(file, line, code.co_qualname, column or 0, end_line, end_column or 0)
    tree = _tree(file)
    if tree is None or column is None or end_column is None:
        return plain
    begin, end = _chars(file, line, column), _chars(file, end_line, end_column)
    node, statement, walrus = _find(tree, line, end_line, begin, end)
    if statement is None:
        return plain
    targets = _targets(statement)
    value = getattr(statement, "value", None)
    same = node is not None and (node is value or node in _carried(value))
    bound = isinstance(statement, (ast.Assign, ast.AnnAssign, ast.AugAssign)) and (same or isinstance(statement, ast.AugAssign))
    if isinstance(statement, ast.AugAssign) and node is not None and node is not statement:
        bound = False
    if isinstance(node, ast.Call) and _makes_distribution(_unparse(node.func).rpartition(".")[2]):
        bound = False  # what is bound is no tensor
    name = targets if bound else walrus or _beside(statement, node) or _in_place(node)
    return Site(
        file=file,
        line=line,
        function=code.co_qualname,
        column=column,
        end_line=end_line,
        end_column=end_column,
        name=name,
        within=targets,
        expression=_unparse(node) if node is not None else "",
        args=_args(node, _modules(file)) if node is not None else (),
        source=(source := _excerpt(file, statement)),
        other=_other(file, source),
    )


def definition_of(function: Callable[..., Any], expression: str) -> Site | None:
    """Return where a function is defined, None if it is not written in Python. expression: what a call of it is called."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    if code is None:
        return None
    numbers = range(code.co_firstlineno, code.co_firstlineno + CONTEXT)  # below its decorators
    line = next((n for n in numbers if f"def {code.co_name}" in linecache.getline(code.co_filename, n)), code.co_firstlineno)
    around = range(max(1, line - CONTEXT), line + 2 * CONTEXT + 1)
    source = tuple((n, text.rstrip("\n")[:LONGEST]) for n in around if (text := linecache.getline(code.co_filename, n)))
    return Site(code.co_filename, line, code.co_qualname, end_line=line, expression=expression, source=source)


def _chars(file: str, line: int, column: int) -> int:
    """Columns come in UTF-8 bytes, as they do in the tree; kept as they are, but bounded by the line."""
    return min(column, len(linecache.getline(file, line).encode()))


def _find(tree: ast.Module, line: int, end_line: int, column: int, end_column: int) -> tuple[ast.AST | None, ast.stmt | None, str | None]:
    """Return the expression at exactly these positions, the innermost statement around them, and the name that `:=` gives it."""
    statement: ast.stmt | None = None
    exact: ast.AST | None = None
    named: list[ast.NamedExpr] = []
    stack: list[ast.AST] = [tree]
    while stack:
        node = stack.pop()
        for child in ast.iter_child_nodes(node):
            start = getattr(child, "lineno", None)
            if start is None:
                stack.append(child)
                continue
            begin, end = (child.lineno, child.col_offset), (child.end_lineno, child.end_col_offset)  # type: ignore[attr-defined]
            if begin <= (line, column) and end >= (end_line, end_column):
                if isinstance(child, ast.stmt):
                    statement = child
                if isinstance(child, ast.NamedExpr):
                    named.append(child)
                if begin == (line, column) and end == (end_line, end_column) and not isinstance(child, ast.Expr):
                    exact = exact if isinstance(exact, ast.expr) else child
                stack.append(child)
    walrus = next((_unparse(found.target) for found in named if found.value is exact), None)
    return exact, statement, walrus


def _beside(statement: ast.stmt, node: ast.AST | None) -> str | None:
    """What one of several expressions is bound to: `a, b = f(x), g(x)`."""
    if not isinstance(statement, ast.Assign) or len(statement.targets) != 1 or not isinstance(statement.value, ast.Tuple):
        return None
    target = statement.targets[0]
    names, values = target.elts if isinstance(target, (ast.Tuple, ast.List)) else [], statement.value.elts
    if len(names) != len(values) or any(isinstance(item, ast.Starred) for item in (*names, *values)):
        return None
    return next((_unparse(name) for name, value in zip(names, values, strict=True) if value is node), None)


_CARRIES = frozenset(("clone", "contiguous", "cpu", "cuda", "detach", "requires_grad_"))  # methods that give the same numbers


def _carried(value: ast.expr | None) -> list[ast.expr]:
    """The expressions whose numbers a statement's value are: in `kl = x.mean().detach()` the mean has a name."""
    found: list[ast.expr] = []
    while isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute) and value.func.attr in _CARRIES:
        value = value.func.value
        found.append(value)
    return found


def _in_place(node: ast.AST | None) -> str | None:
    """What is written to by a method that says so: `x.sub_(y).div_(z)` makes x."""
    while isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and re.fullmatch(r"[a-z]\w*[a-z0-9]_", node.func.attr):
        node = node.func.value
        if isinstance(node, (ast.Name, ast.Attribute)) and not _is_module(node):
            return _unparse(node)
    return None


def _targets(statement: ast.stmt) -> str | None:
    if isinstance(statement, ast.Assign):
        return ", ".join(_unparse(target) for target in statement.targets)
    if isinstance(statement, (ast.AnnAssign, ast.AugAssign)):
        return _unparse(statement.target)
    if isinstance(statement, ast.Return):
        return None
    return None


_REFLECTED = (ast.Add, ast.Sub, ast.Mult, ast.Div)  # `1 - x` is x's rsub, `1 / x` its reciprocal: torch gets the tensor first


@lru_cache(maxsize=64)
def _modules(file: str) -> frozenset[str]:
    """The names that a file gives to modules: `th` after `import torch as th`."""
    tree = _tree(file)
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.Import)] if tree is not None else []
    return frozenset(alias.asname or alias.name.partition(".")[0] for node in imports for alias in node.names)


def _args(node: ast.AST, modules: frozenset[str] = frozenset()) -> tuple[str, ...]:
    """The texts of an expression's operands in the order in which the operator receives them. modules: names that are no operands."""
    if isinstance(node, ast.BinOp):
        turned = isinstance(node.op, _REFLECTED) and _is_number(node.left)
        return (_unparse(node.right), _unparse(node.left)) if turned else (_unparse(node.left), _unparse(node.right))
    if isinstance(node, ast.UnaryOp):
        return (_unparse(node.operand),)
    if isinstance(node, ast.Compare):
        return _unparse(node.left), *(_unparse(other) for other in node.comparators)
    if isinstance(node, ast.Subscript):
        return (_unparse(node.value),)
    if isinstance(node, ast.AugAssign):
        return _unparse(node.target), _unparse(node.value)
    if isinstance(node, ast.Call):
        own = tuple(_unparse(arg) for arg in node.args)
        if _is_of_distributions(_unparse(node.func).rpartition(".")[2]):
            return ()  # what is calculated with is in them
        if isinstance(node.func, ast.Attribute) and not _is_module(node.func.value, modules) and not _is_itself(node.func.value):
            return _unparse(node.func.value) if hasattr(Tensor, node.func.attr) else "", *own  # `block.first(x)` reads no tensor block
        return own
    return ()


def _is_of_distributions(name: str) -> bool:
    """Is a function one of torch's distributions, as `log_prob`, or what makes one?"""
    own = hasattr(Distribution, name) and not hasattr(Tensor, name)
    return name == "kl_divergence" or own or _makes_distribution(name)


def _makes_distribution(name: str) -> bool:
    made = getattr(distributions, name, None)
    return isinstance(made, type) and issubclass(made, Distribution)


def _is_number(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) or (isinstance(node, ast.UnaryOp) and _is_number(node.operand))


def _is_module(node: ast.expr, modules: frozenset[str] = frozenset()) -> bool:
    """`torch.exp(x)` has no receiver, `x.exp()` has: told apart by the names modules go by."""
    if isinstance(node, ast.Attribute):
        return _is_module(node.value, modules)
    return isinstance(node, ast.Name) and (node.id in modules or node.id in ("torch", "F", "nn", "math", "np", "functional"))


def _is_itself(node: ast.expr) -> bool:
    """Of `self.first(x)` the receiver is the model, and no operand."""
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


def _unparse(node: ast.AST) -> str:
    try:
        text = ast.unparse(node)
    except RecursionError:  # a sum of a thousand terms
        return ""
    return text if len(text) <= LONGEST else text[: LONGEST - 1] + "…"


def _excerpt(file: str, statement: ast.stmt) -> tuple[tuple[int, str], ...]:
    last = statement.end_lineno or statement.lineno
    if last - statement.lineno > 12:  # a compound statement: its head says enough
        last = statement.lineno
    numbers = range(max(1, statement.lineno - CONTEXT), last + CONTEXT + 1)
    return tuple((number, text.rstrip("\n")[:LONGEST]) for number in numbers if (text := linecache.getline(file, number)))


def _other(file: str, source: tuple[tuple[int, str], ...]) -> tuple[int, ...]:
    """The numbers of the lines that stand otherwise in the file: in another encoding, with another end or none, after a mark, or longer."""
    lines = _bytes(file)
    if lines is None:
        return ()
    return tuple(n for n, text in source if n >= len(lines) or lines[n - 1] != text.encode(errors="surrogatepass"))
