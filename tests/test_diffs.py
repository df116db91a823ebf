"""The fix as a change of the source: it says what was run, and whoever makes it has a run that stays healthy."""

from __future__ import annotations

import math
from pathlib import Path

import new
import pytest
import torch

import nanscope
from nanscope.program.idioms import Text, literal, number, written
from nanscope.replay.diffs import diffs
from nanscope.report.diff import changed, hunks_of, unified, written_fix
from nanscope.snapshot.observation import Diff
from nanscope.verdict.incident import Fix

FOLDER = Path(__file__).parent / "incidents"
SCRIPTS = sorted(path for path in FOLDER.glob("*.py") if path.stem not in ("expected", "new"))
BY_DAY = 16  # of so many scripts one

NOT_ENOUGH = {  # what is shown is what was run, and the script needs more
    # a custom function divides again in its own backward, which the recorded step does not run anew
    "cosmos_rl_155_fused_linear_ce_all_ignored",
    "lsq_step_size_of_fresh_lora_b",
    # the loop makes the next weight bad by another line
    "megatron_7517_qk_clip_negative_max_logit",
    # the next line overflows as silently
    "smp_463_dice_sums_in_half",
}

X = torch.tensor([[0.5, -1.5, 2.0], [-0.25, 4.0, -3.0]])
M = torch.tensor([[True, False, True], [False, True, True]])
CASES = [  # operator, arguments as torch gets them, as the source has them, keywords, what is written
    ("clamp.default", (X, -20.0, 20.0), ("x", -20.0, 20.0), {}, "x.clamp(min=-20.0, max=20.0)"),
    ("clamp.default", (X, -1.0, None), ("x", -1.0, None), {}, "x.clamp(min=-1.0)"),
    ("clamp_min.default", (X, 1e-8), ("x", 1e-8), {}, "x.clamp(min=1e-08)"),
    ("clamp_max.default", (X, 0.5), ("x", 0.5), {}, "x.clamp(max=0.5)"),
    ("masked_fill.Scalar", (X, M, 0.0), ("x", "m", 0.0), {}, "x.masked_fill(m, 0.0)"),
    ("where.ScalarOther", (M, X, 0.0), ("m", "x", 0.0), {}, "torch.where(m, x, 0.0)"),
    ("nan_to_num.default", (X, 0.0, 0.0, 0.0), ("x", 0.0, 0.0, 0.0), {}, "x.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)"),
    ("add.Scalar", (X, 1e-8), ("x", 1e-8), {}, "x + 1e-08"),
    ("eq.Scalar", (X, 2), ("x", 2), {}, "x == 2"),
    ("bitwise_not.default", (M,), ("m",), {}, "~m"),
    ("isinf.default", (X,), ("x",), {}, "x.isinf()"),
    ("unsqueeze.default", (X, -1), ("x", -1), {}, "x.unsqueeze(-1)"),
    ("_log_softmax.default", (X, -1, False), ("x", -1, False), {}, "torch.log_softmax(x, -1)"),
    ("_softmax.default", (X, -1, False), ("x", -1, False), {}, "torch.softmax(x, -1)"),
    ("_safe_softmax.default", (X, -1), ("x", -1), {}, "torch._safe_softmax(x, -1)"),
    ("softplus.default", (X,), ("x",), {}, "F.softplus(x)"),
    ("log_sigmoid_forward.default", (X,), ("x",), {}, "F.logsigmoid(x)"),
    ("logsumexp.default", (X, [1], True), ("x", (1,), True), {}, "torch.logsumexp(x, 1, True)"),
    ("std.correction", (X, [1]), ("x", (1,)), {"correction": 0, "keepdim": True}, "x.std(1, correction=0, keepdim=True)"),
    ("_to_copy.default", (X,), ("x",), {"dtype": torch.float64}, "x.double()"),
    ("zeros_like.default", (X,), ("x",), {}, "torch.zeros_like(x)"),
]


@pytest.mark.parametrize(("op", "given", "shown", "keywords", "text"), CASES, ids=[case[0] for case in CASES])
def test_a_call_is_written_as_torch_takes_it(op: str, given: tuple, shown: tuple, keywords: dict, text: str) -> None:  # type: ignore[type-arg]
    """What stands in the diff gives the very bits that the call of the program gave."""
    name, overload = op.split(".")
    texts = [Text(arg) if isinstance(arg, str) else None if arg is None else literal(arg) for arg in shown]
    said = written(name, texts, keywords)
    assert said is not None and said.text == text
    wanted = getattr(getattr(torch.ops.aten, name), overload)(*given, **keywords)
    found = eval(said.text, {"x": X, "m": M, "torch": torch, "F": torch.nn.functional})
    assert torch.equal(found, wanted[0] if isinstance(wanted, tuple) else wanted)


@pytest.mark.parametrize("value", [0.1, 1e-8, -20.0, 0.9999998807907104, 1 - 2**-53, 1e300, math.inf, -math.inf, math.nan, 3, True, None])
def test_a_number_is_written_so_that_it_comes_back(value: float) -> None:
    """The shortest text of a number is still that number, in the precision that it was of."""
    text = number(value).text
    back = eval(text, {"torch": torch})
    single = isinstance(value, float) and torch.tensor(value, dtype=torch.float32).double() == value
    dtype = torch.float32 if single else torch.float64
    assert back is value or torch.equal(torch.tensor([back], dtype=dtype), torch.tensor([value], dtype=dtype)) or math.isnan(value)


@pytest.mark.parametrize("value", [-1, -0.5])
def test_a_negative_number_is_no_operand_without_parentheses(value: float) -> None:
    """`-1 ** x` is another number than `(-1) ** x`."""
    assert number(value).operand == f"({value})"


def selected() -> list[object]:
    return [pytest.param(path, id=path.stem, marks=[] if n % BY_DAY == 0 else [pytest.mark.nightly]) for n, path in enumerate(SCRIPTS)]


def mended(path: Path, verdict: nanscope.Verdict, folder: Path) -> Path | None:
    """The script with what the fix of its first incident changes; None if that is not known, or is elsewhere."""
    fix = written_fix(verdict.incidents[0]) if verdict.incidents else None
    if fix is None or any(Path(diff.file).name != path.name for diff in fix.diffs):
        return None
    lines = path.read_text().split("\n")
    for diff in sorted(fix.diffs, key=lambda diff: -diff.line):
        place = slice(diff.line - 1, diff.line - 1 + len(diff.removed))
        assert tuple(lines[place]) == diff.removed
        lines[place] = diff.added if diff.removed else (*diff.added, *lines[place])
    copy = folder / path.name
    copy.write_text("\n".join(lines))
    return copy


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("path", selected())
def test_whoever_makes_the_change_has_a_healthy_run(path: Path, tmp_path: Path) -> None:
    """The diff is applied to the script, and nothing harmful happens in it any more."""
    verdict = new.watched(new.load(path), tmp_path / "before")
    copy = mended(path, verdict, tmp_path)
    if copy is None:
        pytest.skip("its change of the source is not known")
    again = new.watched(new.load(copy), tmp_path / "after")
    assert (again.incidents == ()) == (path.stem not in NOT_ENOUGH), again.sentence


DIFF = Diff("/somewhere/train.py", 3, ("\ty = x.exp()",), ("\ty = x.clamp(max=20.0).exp()",), ("def f(x):", ""), ("\treturn y",))
FIX = Fix("clamp_exponent", "clamp x", "train.py:3", True, True, distortion=0.0, diffs=(DIFF,))


def test_a_diff_is_one_that_patch_takes() -> None:
    """A file is called by its name, lines are counted, and what stays stands around what is changed."""
    assert unified(FIX).splitlines() == [
        "--- train.py",
        "+++ train.py",
        "@@ -1,4 +1,4 @@",
        " def f(x):",
        " ",
        "-\ty = x.exp()",
        "+\ty = x.clamp(max=20.0).exp()",
        " \treturn y",
    ]
    assert unified(None) == ""


def test_blanks_of_the_source_stay_in_the_diff() -> None:
    """A tab is a tab to `patch`, and a blank at the end of a line is one; a terminal shows neither."""
    diff = Diff("a.py", 2, ("\ty = x.exp()  ",), ("\ty = x.clamp(max=20.0).exp()  ",), ("def f(x): ",), ())
    fix = Fix("clamp_exponent", "clamp x", "a.py:2", True, True, distortion=0.0, diffs=(diff,))
    assert unified(fix).splitlines()[3:] == [" def f(x): ", "-\ty = x.exp()  ", "+\ty = x.clamp(max=20.0).exp()  "]
    assert [line.text for line in changed(hunks_of(fix)[0])] == ["y = x.exp()", "y = x.clamp(max=20.0).exp()"]


def test_the_changed_lines_are_shown_without_their_indentation() -> None:
    """A terminal is narrow."""
    (hunk,) = hunks_of(FIX)
    assert [(line.sign, line.text) for line in changed(hunk)] == [("-", "y = x.exp()"), ("+", "y = x.clamp(max=20.0).exp()")]
    assert hunk.where == "train.py:3"


def test_what_is_hostile_in_a_diff_is_shown_and_does_nothing() -> None:
    """Source comes out of a file, and may hold anything."""
    evil = Diff("a\x1b[31m.py", 1, ("x\u202ey\x07",), ("<script>" * 400,))
    text = unified(Fix("clamp_input", "", None, True, True, distortion=0.0, diffs=(evil,)))
    assert not any(sign in text for sign in ("\x1b", "\u202e", "\x07")) and max(map(len, text.splitlines())) <= 1700


def test_the_same_program_has_no_change() -> None:
    """Nothing was edited, and nothing is to be shown."""
    from nanscope.locate.names import Names
    from nanscope.program.program import Program

    empty = Program((), (), 0, ())
    assert diffs(empty, Names(empty), empty) == ()
