"""Positions: from an instruction back to the words of the line, for every way in which people write a loss."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from nanscope.capture.source import LONGEST, site_of
from nanscope.program.calls import Site

# What runs in the planted files: every call is an instruction of its own, and says where it was made.
HEAD = """
import sys
SEEN = []

def note(*args, **kwargs):
    frame = sys._getframe(1)
    SEEN.append((frame.f_code, frame.f_lasti))
    return Number()

class Number:
    def _noted(self, *args):
        frame = sys._getframe(1)
        SEEN.append((frame.f_code, frame.f_lasti))
        return self
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __neg__ = __invert__ = __pow__ = _noted
    __rtruediv__ = __rpow__ = _noted
    __gt__ = __le__ = __iadd__ = __imul__ = __getitem__ = __matmul__ = exp = sum = detach = clone = clamp = sub_ = div_ = _noted
    def __setitem__(self, key, value):
        self._set(sys._getframe(1))
    def _set(self, frame):
        SEEN.append((frame.f_code, frame.f_lasti))
    def __iter__(self):
        return iter((self, self))

x = y = mask = Number()
inputs = {"old_logps": x}
class torch:
    exp = staticmethod(note)
    min = staticmethod(note)
"""


def sites(tmp_path: Path, source: str, name: str = "loss.py") -> list[Site]:
    """Run source code from a file of its own and return the site of every call that it made."""
    path = tmp_path / name
    path.write_text(HEAD + textwrap.dedent(source), encoding="utf-8")
    space: dict[str, Any] = {"__name__": "planted"}
    exec(compile(path.read_text(encoding="utf-8"), str(path), "exec"), space)
    return [site_of(code, lasti) for code, lasti in space["SEEN"]]


FIRST = HEAD.count("\n") + 1

CASES: list[tuple[str, list[tuple[str | None, str | None, str, tuple[str, ...]]]]] = [
    # (name, within, expression, args) of each call, in the order in which they are made
    ("ratio = torch.exp(x)", [("ratio", "ratio", "torch.exp(x)", ("x",))]),
    ("ratio = x.exp()", [("ratio", "ratio", "x.exp()", ("x",))]),
    ("ratio: object = x.exp()", [("ratio", "ratio", "x.exp()", ("x",))]),
    ("log_ratio = x - y", [("log_ratio", "log_ratio", "x - y", ("x", "y"))]),
    ("a = b = x * y", [("a, b", "a, b", "x * y", ("x", "y"))]),
    ("z = -x", [("z", "z", "-x", ("x",))]),
    # a number before a tensor comes second
    ("z = 1 / x", [("z", "z", "1 / x", ("x", "1"))]),
    ("z = -1 - x", [("z", "z", "-1 - x", ("x", "-1"))]),
    ("z = 2 ** x", [("z", "z", "2 ** x", ("2", "x"))]),
    ("keep = x > y", [("keep", "keep", "x > y", ("x", "y"))]),
    ("x.exp()", [(None, None, "x.exp()", ("x",))]),
    # several calls on one line
    (
        "coef_1 = torch.exp(x - y)",
        [(None, "coef_1", "x - y", ("x", "y")), ("coef_1", "coef_1", "torch.exp(x - y)", ("x - y",))],
    ),
    (
        "loss = -torch.min(x * y, x.clamp(1, 2) * y)",
        [
            (None, "loss", "x * y", ("x", "y")),
            (None, "loss", "x.clamp(1, 2)", ("x", "1", "2")),
            (None, "loss", "x.clamp(1, 2) * y", ("x.clamp(1, 2)", "y")),
            (None, "loss", "torch.min(x * y, x.clamp(1, 2) * y)", ("x * y", "x.clamp(1, 2) * y")),
            ("loss", "loss", "-torch.min(x * y, x.clamp(1, 2) * y)", ("torch.min(x * y, x.clamp(1, 2) * y)",)),
        ],
    ),
    (
        "loss = x.exp().sum()",
        [(None, "loss", "x.exp()", ("x",)), ("loss", "loss", "x.exp().sum()", ("x.exp()",))],
    ),
    ("a = x.exp(); b = y.exp()", [("a", "a", "x.exp()", ("x",)), ("b", "b", "y.exp()", ("y",))]),
    ("a, b = x.exp(), y.exp()", [("a", "(a, b)", "x.exp()", ("x",)), ("b", "(a, b)", "y.exp()", ("y",))]),
    # several lines
    (
        """
        per_token_loss = (
            x
            * y
            - mask.exp()
        )
        """,
        [
            (None, "per_token_loss", "x * y", ("x", "y")),
            (None, "per_token_loss", "mask.exp()", ("mask",)),
            ("per_token_loss", "per_token_loss", "x * y - mask.exp()", ("x * y", "mask.exp()")),
        ],
    ),
    (
        """
        loss = torch.min(
            x.exp(),  # unclipped
            y,
        )
        """,
        [(None, "loss", "x.exp()", ("x",)), ("loss", "loss", "torch.min(x.exp(), y)", ("x.exp()", "y"))],
    ),
    # targets of other kinds
    (
        "z = x.exp().detach().clone()",
        [
            ("z", "z", "x.exp()", ("x",)),
            ("z", "z", "x.exp().detach()", ("x.exp()",)),
            ("z", "z", "x.exp().detach().clone()", ("x.exp().detach()",)),
        ],
    ),
    ("z = x.exp().sum()", [(None, "z", "x.exp()", ("x",)), ("z", "z", "x.exp().sum()", ("x.exp()",))]),
    (
        "y.sub_(x.exp()).div_(2)",
        [
            (None, None, "x.exp()", ("x",)),
            ("y", None, "y.sub_(x.exp())", ("y", "x.exp()")),
            ("y", None, "y.sub_(x.exp()).div_(2)", ("y.sub_(x.exp())", "2")),
        ],
    ),
    ("x += y", [("x", "x", "x += y", ("x", "y"))]),
    ("x *= y.exp()", [(None, "x", "y.exp()", ("y",)), ("x", "x", "x *= y.exp()", ("x", "y.exp()"))]),
    ("a, b = x.sum()", [("(a, b)", "(a, b)", "x.sum()", ("x",))]),
    ("inputs['ref'] = x.exp()", [("inputs['ref']", "inputs['ref']", "x.exp()", ("x",))]),
    ("x.loss = x.exp()", [("x.loss", "x.loss", "x.exp()", ("x",))]),
    ("if (ratio := x.exp()): pass", [("ratio", None, "x.exp()", ("x",))]),
    (
        "loss = (ratio := x.exp()) * y",
        [("ratio", "loss", "x.exp()", ("x",)), ("loss", "loss", "(ratio := x.exp()) * y", ("(ratio := x.exp())", "y"))],
    ),
    # where the value comes from
    ("z = inputs['old_logps'] - x", [("z", "z", "inputs['old_logps'] - x", ("inputs['old_logps']", "x"))]),
    ("z = x[0, 1:]", [("z", "z", "x[0, 1:]", ("x",))]),
    ("x[mask] = 0", [(None, "x[mask]", "x[mask]", ("x",))]),
    ("z = x @ y", [("z", "z", "x @ y", ("x", "y"))]),
    # other statements
    ("def f():\n    return x.exp()\nf()", [(None, None, "x.exp()", ("x",))]),
    ("f = lambda a: a.exp()\nz = f(x)", [(None, "f", "a.exp()", ("a",))]),
    ("z = [a.exp() for a in (x, y)]", [(None, "z", "a.exp()", ("a",))] * 2),
    ("for i in (x.exp(),): pass", [(None, None, "x.exp()", ("x",))]),
    ("if x > y:\n    z = x.exp()", [(None, None, "x > y", ("x", "y")), ("z", "z", "x.exp()", ("x",))]),
    ("while x.exp():\n    break", [(None, None, "x.exp()", ("x",))]),
    ("assert x.exp()", [(None, None, "x.exp()", ("x",))]),
    ("with open('/dev/null') as f: z = x.exp()", [("z", "z", "x.exp()", ("x",))]),
    ("try:\n    z = x.exp()\nfinally:\n    pass", [("z", "z", "x.exp()", ("x",))]),
    ("class A:\n    def loss(self, a):\n        b = a.exp()\n        return b\nA().loss(x)", [("b", "b", "a.exp()", ("a",))]),
    ("z = note(x, eps=1)", [("z", "z", "note(x, eps=1)", ("x",))]),
    ("z = note(*[x], **{})", [("z", "z", "note(*[x], **{})", ("*[x]",))]),
    # columns are counted in bytes, people write letters
    ("λ = x; Δ = λ - y", [("Δ", "Δ", "λ - y", ("λ", "y"))]),
    ("s = 'äöü→'; z = x.exp()", [("z", "z", "x.exp()", ("x",))]),
]


@pytest.mark.parametrize(("source", "wanted"), CASES, ids=[case[0].strip().split("\n")[0] for case in CASES])
def test_a_call_is_told_in_the_words_of_its_line(
    tmp_path: Path, source: str, wanted: list[tuple[str | None, str | None, str, tuple[str, ...]]]
) -> None:
    """The variable it is bound to, the statement around it, its own text, and what it was given."""
    found = [(site.name, site.within, site.expression, site.args) for site in sites(tmp_path, source)]
    assert found == wanted


def test_a_site_tells_where(tmp_path: Path) -> None:
    """File, line, columns from 0, the function's full name, and the lines around."""
    source = "class Trainer:\n    def loss(self):\n        ratio = x.exp()\n        return ratio\nTrainer().loss()\n"
    (site,) = sites(tmp_path, source)
    assert site.file == str(tmp_path / "loss.py") and site.line == site.end_line == FIRST + 2
    assert (site.column, site.end_column) == (16, 23) and site.function == "Trainer.loss"
    shown = dict(site.source)
    assert (
        shown[site.line] == "        ratio = x.exp()"
        and shown[site.line - 2] == "class Trainer:"
        and shown[site.line + 2] == "Trainer().loss()"
    )


def test_a_copy_of_a_file_is_another_file(tmp_path: Path) -> None:
    """The code of a function that was copied equals the first one's, line by line; each is told where it stands."""
    for folder in ("one", "other"):
        (tmp_path / folder).mkdir()
        (site,) = sites(tmp_path / folder, "z = x.exp()\n")
        assert site.file == str(tmp_path / folder / "loss.py")


@pytest.mark.parametrize(
    ("text", "other"), [(b"%s", False), (b"%s\r", True), (b"%s ", False), ("%s # ü".encode(), False), (b"%s #" + b"x" * 500, True)]
)
def test_a_line_that_the_file_holds_otherwise_is_known(text: bytes, other: bool, tmp_path: Path) -> None:
    """With another end, or longer than what is kept: no patch can quote it."""
    script = tmp_path / "other.py"
    script.write_bytes(b"def f(x, note):\n    y = 1\n" + text % b"    z = note(x)" + b"\n    return z\n")
    space: dict[str, Any] = {}
    exec(compile(script.read_bytes(), str(script), "exec"), space)
    found: list[Site] = []
    space["f"](1, lambda _: found.append(site_of(sys._getframe(1).f_code, sys._getframe(1).f_lasti)))
    assert found[0].other == ((3,) if other else ())
    assert [number for number, _ in found[0].source] == [1, 2, 3, 4]


def test_a_long_statement_is_shown_whole_a_block_is_not(tmp_path: Path) -> None:
    """Four lines around a statement; of an `if` with a page of code in it, the head."""
    body = "\n".join(f"    z{i} = y" for i in range(40))
    (site, *_) = sites(tmp_path, f"if x > y:\n{body}\n")
    assert len(site.source) <= 10 and dict(site.source)[FIRST] == "if x > y:"
    lines = "\n".join(f"    + {i}" for i in range(10))
    wide = sites(tmp_path, f"z = (\n    x\n{lines}\n)\n", "wide.py")[-1]
    assert {number for number, _ in wide.source} >= set(range(FIRST, FIRST + 13))


def test_long_expressions_are_cut(tmp_path: Path) -> None:
    """A line of generated code does not fill the file."""
    site = sites(tmp_path, "z = " + " + ".join(["x"] * 150))[-1]
    assert len(site.expression) == LONGEST and site.expression.endswith("…")
    assert all(len(word) <= LONGEST for word in site.args) and all(len(text) <= LONGEST for _, text in site.source)


def test_endless_expressions_are_no_trouble(tmp_path: Path) -> None:
    """A sum of a thousand terms is a tree a thousand nodes deep: its text may be missing, its place is not."""
    site = sites(tmp_path, "z = " + " + ".join(["x"] * 1100))[-1]  # Python itself stops at 1000
    assert site.line == FIRST and len(site.expression) <= LONGEST


def called(function: Callable[..., Any]) -> Site:
    """The site at which `function` calls what it is given."""
    seen: list[Site] = []

    def here() -> None:
        frame: FrameType = sys._getframe(1)
        seen.append(site_of(frame.f_code, frame.f_lasti))

    function(here)
    return seen[0]


def test_code_without_a_file_still_has_a_line() -> None:
    """Typed into a prompt, made by exec, or from a file that is gone: no words, and no error."""
    space: dict[str, Any] = {}
    exec(compile("def f(note):\n    x = 1\n    y = note()\n", "<typed>", "exec"), space)
    site = called(space["f"])
    assert (site.file, site.line, site.function, site.name, site.expression, site.source) == ("<typed>", 3, "f", None, "", ())
    gone: dict[str, Any] = {}
    exec(compile("def g(note):\n    y = note()\n", "/nowhere/gone.py", "exec"), gone)
    assert called(gone["g"]).line == 2 and called(gone["g"]).name is None


def test_a_file_that_was_edited_under_way_gives_no_wrong_words_without_end(tmp_path: Path) -> None:
    """Columns that lie outside the line as it is now find nothing, and raise nothing."""
    path = tmp_path / "edited.py"
    path.write_text("def f(note):\n    a_rather_long_name_for_a_variable = note()\n")
    space: dict[str, Any] = {}
    exec(compile(path.read_text(), str(path), "exec"), space)
    path.write_text("x = 1\n")
    site = called(space["f"])
    assert site.line == 2 and site.name is None and site.expression == ""


@pytest.mark.parametrize("text", ["def f(:\n", "\x00\x00", "if x\n  ((("])
def test_a_file_that_is_no_python_is_no_trouble(tmp_path: Path, text: str) -> None:
    """Somebody overwrote the script; the code in memory runs on."""
    path = tmp_path / "broken.py"
    space: dict[str, Any] = {}
    exec(compile("def f(note):\n    y = note()\n", str(path), "exec"), space)
    path.write_text(text)
    site = called(space["f"])
    assert (site.line, site.function, site.name) == (2, "f", None)


def test_a_position_that_does_not_exist_is_the_beginning_of_the_function() -> None:
    """An instruction number that the code does not have."""
    code = called.__code__
    for lasti in (-1, 10**6):
        assert site_of(code, lasti).line == code.co_firstlineno


def test_code_without_columns_is_told_by_its_line() -> None:
    """Python can be asked to leave the columns out (-X no_debug_ranges)."""

    def f(note: Callable[[], None]) -> None:
        return note()

    from types import CodeType

    code: CodeType = f.__code__
    stripped = code.replace(co_linetable=_only_lines(code))
    f.__code__ = stripped
    site = called(f)
    assert site.line == code.co_firstlineno + 1 and site.name is None


def _only_lines(code: Any) -> bytes:
    """A position table with lines and without columns (form 13 of PEP 626's table: line delta, no column)."""
    table = bytearray()
    previous = code.co_firstlineno
    for line, *_ in code.co_positions():
        delta = (line or previous) - previous
        previous = line or previous
        table.append(0x80 | (13 << 3) | 0)  # one code unit
        unsigned = ((-delta) << 1) | 1 if delta < 0 else delta << 1
        while unsigned >= 64:
            table.append(0x40 | (unsigned & 0x3F))
            unsigned >>= 6
        table.append(unsigned)
    return bytes(table)
