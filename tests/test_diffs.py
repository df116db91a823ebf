"""The fix as a change of the source: it says what was run, and whoever makes it has a run that stays healthy."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path

import new
import pytest
import torch
from patching import RUN, patched, patched_all
from test_incident import INCIDENT

import nanscope
from nanscope.program.spelling import ATOM, Phrase
from nanscope.replay.diffs import diffs
from nanscope.replay.handwriting import literal, number, written
from nanscope.report.diff import changed, hunks_of, unified, written_fix
from nanscope.report.render import RENDERERS
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
    # the bound is written as a setting that is 0 in that step
    "nemo_10530_capturable_adam_at_lr_zero",
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
    ("softplus.default", (X,), ("x",), {}, "torch.nn.functional.softplus(x)"),
    ("log_sigmoid_forward.default", (X,), ("x",), {}, "torch.nn.functional.logsigmoid(x)"),
    ("logsumexp.default", (X, [1], True), ("x", (1,), True), {}, "torch.logsumexp(x, 1, True)"),
    ("std.correction", (X, [1]), ("x", (1,)), {"correction": 0, "keepdim": True}, "x.std(1, correction=0, keepdim=True)"),
    ("_to_copy.default", (X,), ("x",), {"dtype": torch.float64}, "x.double()"),
    ("zeros_like.default", (X,), ("x",), {}, "torch.zeros_like(x)"),
]


@pytest.mark.parametrize(("op", "given", "shown", "keywords", "text"), CASES, ids=[case[0] for case in CASES])
def test_a_call_is_written_as_torch_takes_it(op: str, given: tuple, shown: tuple, keywords: dict, text: str) -> None:  # type: ignore[type-arg]
    """What stands in the diff gives the very bits that the call of the program gave."""
    name, overload = op.split(".")
    texts = [Phrase(arg) if isinstance(arg, str) else None if arg is None else literal(arg) for arg in shown]
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
    assert number(value).inside(ATOM) == f"({value})"


def selected() -> list[object]:
    return [pytest.param(path, id=path.stem, marks=[] if n % BY_DAY == 0 else [pytest.mark.nightly]) for n, path in enumerate(SCRIPTS)]


def mended(path: Path, verdict: nanscope.Verdict, folder: Path) -> Path | None:
    """The script with what the fix of its first incident changes; None if that is not known, or is elsewhere."""
    fix = written_fix(verdict.incidents[0]) if verdict.incidents else None
    if fix is None or any(Path(diff.file).name != path.name for diff in fix.diffs):
        return None
    return patched(path, fix, folder / "mended")


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


NAMES = "log_probs, ref, mask"
LINE = "    diff = ref - log_probs\n    kl = torch.exp(diff) - diff - 1\n"
FORMULA = f"import torch\n\n\ndef loss({NAMES}):\n{LINE}    return (kl * mask).sum() / mask.sum()\n"
PLAIN = FORMULA + RUN
LONG = "    # " + "long " * 100 + "\n"
BYTES = {  # a file, and whether a patch can be made of it
    "plain": (PLAIN.encode(), True),
    "crlf": (PLAIN.replace("\n", "\r\n").encode(), False),
    "one_crlf": (PLAIN.replace("kl = torch.exp(diff) - diff - 1\n", "kl = torch.exp(diff) - diff - 1\r\n").encode(), False),
    "carriage_returns": (PLAIN.replace("\n", "\r").encode(), False),
    "latin_1": (b"# coding: latin-1\n" + PLAIN.replace("diff - 1", "diff - 1  # größer").encode("latin-1"), False),
    "latin_1_elsewhere": ("# coding: latin-1\n# größer\n\n\n".encode("latin-1") + PLAIN.encode(), True),
    "latin_1_near": (b"# coding: latin-1\n" + PLAIN.replace("mask.sum()", "mask.sum()  # größer", 1).encode("latin-1"), None),
    "utf_8": (PLAIN.replace("diff - 1", "diff - 1  # größer 😀").encode(), True),
    "mark": (b"\xef\xbb\xbf" + PLAIN.encode(), None),
    "tabs": (PLAIN.replace("    ", "\t").replace(" - 1\n", "\t- 1\t\n").encode(), True),
    "form_feed": (PLAIN.replace("diff - 1", "diff - \f1").encode(), False),
    "form_feed_near": (PLAIN.replace("\n\n\ndef loss", "\n\n\f\ndef loss").encode(), None),
    "bidi": (PLAIN.replace("diff - 1", "diff - 1  # \u202e").encode(), False),
    "vertical": (PLAIN.replace("diff - 1", "diff - 1  # \x0b \x1c \x85 \u2028").encode(), False),
    "long": (PLAIN.replace("diff - 1", "diff - 1  # " + "long " * 100).encode(), False),
    "long_above": (PLAIN.replace(LINE, LONG + LINE).encode(), None),
    "long_below": (PLAIN.replace(LINE, LINE + LONG).encode(), None),
    "rather_long": (PLAIN.replace("diff - 1", "diff - 1  # " + "long " * 70).encode(), True),
    "no_end": (RUN.join(("import torch\n", "")).encode() + FORMULA.replace("kl =", "return ((").replace("diff - 1\n", "diff - 1) * mask).sum() / mask.sum()")
               .partition("    return (kl")[0].rstrip("\n").encode(), False),
    "no_end_near": (f"import torch\n{RUN}{FORMULA}".rstrip("\n").encode(), None),
    "at_the_end": (f"import torch\n{RUN}def loss({NAMES}):\n    diff = ref - log_probs\n    return ((torch.exp(diff) - diff - 1) * mask).sum() / mask.sum()\n".encode(), True),
    "blanks": (PLAIN.replace("diff - 1", "diff - 1   ").encode(), True),
}  # fmt: skip


@pytest.mark.parametrize("name", BYTES)
def test_a_patch_that_is_shown_is_one_of_the_file_as_it_is(name: str, tmp_path: Path) -> None:
    """`patch` and `git apply` take it whole, at its very line, and the run is healthy; where the bytes of the file are others there is none."""
    text, told = BYTES[name]
    script = tmp_path / "script of mine.py"
    script.write_bytes(text)
    (incident,) = new.watched(new.load(script), tmp_path / "runs").incidents
    fixes = [fix for fix in incident.fixes if fix.proven and fix.diffs]
    assert told is None or bool(fixes) is told, fixes
    assert any(fix.proven for fix in incident.fixes)
    for fix in fixes:
        copy = patched(script, fix, tmp_path / fix.id)
        assert not new.watched(new.load(copy), tmp_path / fix.id / "runs").incidents


FILLED = "(ref - log_probs).masked_fill(mask == 0, 0.0)"
TWICE = {  # a line that has the operand of its exp again, and what is to stand there
    "twice": ("kl = torch.exp(ref - log_probs) - (ref - log_probs) - 1", f"kl = torch.exp({FILLED}) - {FILLED} - 1"),
    "first": ("kl = -(ref - log_probs) - 1 + torch.exp(ref - log_probs)", f"kl = -{FILLED} - 1 + torch.exp({FILLED})"),
    "by another": ("kl = torch.exp(ref - log_probs) - (log_probs - ref) - 1", f"kl = torch.exp({FILLED}) - (log_probs - ref) - 1"),
    "over two lines": ("kl = (torch.exp(ref - log_probs)\n          - (ref - log_probs) - 1)", f"kl = (torch.exp({FILLED})\n          - {FILLED} - 1)"),
    "elsewhere": ("kl = torch.exp(ref - log_probs) - 1\n    kl = kl - (ref - log_probs)", f"kl = torch.exp({FILLED}) - 1\n    kl = kl - (ref - log_probs)"),
}  # fmt: skip


@pytest.mark.parametrize("name", TWICE)
def test_an_operand_is_filled_wherever_its_line_has_it(name: str, tmp_path: Path) -> None:
    """Half of a formula that is filled gives numbers that mean nothing, and NaN again with the next one that is not finite."""
    line, wanted = TWICE[name]
    script = tmp_path / "script.py"
    script.write_text(PLAIN.replace(LINE, f"    {line}\n"))
    (incident,) = new.watched(new.load(script), tmp_path / "runs").incidents
    copy = patched(script, incident.fixes[0], tmp_path / "mended")
    assert copy.read_text() == PLAIN.replace(LINE, f"    {wanted}\n")
    assert not new.watched(new.load(copy), tmp_path / "runs again").incidents


MASKED = """import torch


def loss(log_probs, old, mask):
    ratio = torch.exp(log_probs - old)
    return {}


def run():
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 6)
    mask = torch.ones(3, 6)
    mask[:, 5] = 0
    old = torch.zeros(3, 6)
    old[1, 5] = -200.0
    loss(model(torch.ones(3, 4)), old, mask{}).backward()
"""
SELECTED = {
    "index": "-ratio[mask.bool()].mean()",
    "index of those that are one": "-ratio[mask == 1].mean()",
    "masked_select": "-ratio.masked_select(mask.bool()).mean()",
    "where": "-torch.where(mask.bool(), ratio, 0.0).sum()",
    "masked_fill": "-ratio.masked_fill(~mask.bool(), 0.0).sum()",
    "to": "-ratio[mask.to(torch.bool)].mean()",
    "a name of its own": "(lambda keep: -ratio[keep].mean())(mask.bool())",
}


@pytest.mark.parametrize("kind", ["", ".long()", ".bool()"], ids=["float", "long", "bool"])
@pytest.mark.parametrize("selects", SELECTED)
def test_a_mask_is_written_as_what_it_is(selects: str, kind: str, tmp_path: Path) -> None:
    """A mask of numbers is made a mask of truths in the patch as well: torch takes nothing else."""
    script = tmp_path / "script.py"
    script.write_text(MASKED.format(SELECTED[selects], kind))
    (incident,) = new.watched(new.load(script), tmp_path / "runs").incidents
    fixes = [fix for fix in incident.fixes if fix.proven and fix.diffs]
    assert fixes and any(fix.id == "mask_before_op" for fix in incident.fixes if fix.proven)
    for fix in fixes:
        copy = patched(script, fix, tmp_path / fix.id)
        assert not new.watched(new.load(copy), tmp_path / fix.id / "runs").incidents, copy.read_text()


EITHER = """import torch


def loss(log_probs):
    gap = (log_probs + {}) * (torch.arange(6) != 4)
    return (1e-6 / gap).mean() + log_probs.mean()


def run():
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 6)
    loss(model(torch.randn(3, 4))).backward()
"""


@pytest.mark.parametrize("shift", [0.0, -9.0, 9.0], ids=["either sign", "negative", "positive"])
def test_a_denominator_keeps_its_sign(shift: float, tmp_path: Path) -> None:
    """Only what is too near to 0 is another number then."""
    script = tmp_path / "script.py"
    script.write_text(EITHER.format(shift))
    (incident,) = new.watched(new.load(script), tmp_path / "runs").incidents
    fix = next(fix for fix in incident.fixes if fix.id == "clamp_denominator")
    assert fix.proven and fix.distortion == 0.0
    copy = patched(script, fix, tmp_path / fix.id)
    assert ("masked_fill" in copy.read_text()) == (shift <= 0)
    assert not new.watched(new.load(copy), tmp_path / fix.id / "runs").incidents, copy.read_text()


SHARP = """import torch


def target(counts, temperature):
    powered = counts ** (1.0 / temperature)
    return powered / powered.sum(-1, keepdim=True)


def run():
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 5)
    for temperature in (1.0, 0.5, 0.01):
        counts = torch.arange(1.0, 16.0).view(3, 5)
        loss = -(target(counts, temperature) * model(torch.randn(3, 4)).log_softmax(-1)).sum(-1).mean()
        loss.backward()
"""


def test_a_number_that_the_source_computes_stays_computed(tmp_path: Path) -> None:
    """It is another one in another step, and what was healthy before the change is so after it, to the same number."""
    script = tmp_path / "script.py"
    script.write_text(SHARP)
    (incident,) = new.watched(new.load(script), tmp_path / "runs").incidents
    fix = next(fix for fix in incident.fixes if fix.id == "stable_function")
    assert fix.proven and "* (1.0 / temperature)" in str(fix.diffs) and "100.0" not in str(fix.diffs)
    copy = patched(script, fix, tmp_path / fix.id)
    assert not new.watched(new.load(copy), tmp_path / fix.id / "runs").incidents, copy.read_text()


def test_a_change_within_what_is_changed_is_in_it(tmp_path: Path) -> None:
    """Two edits of one line, one of an operand of the other's: each stands where it was run."""
    line, wanted = (
        "    return (log_probs.square().sum() * n / n).log()",
        "(log_probs.square().sum() * n / n.clamp(min=1e-08)).clamp(min=1e-08).log()",
    )
    script = tmp_path / "script.py"
    head = "import torch\n\n\ndef loss(log_probs, n):\n"
    tail = "\n\n\ndef run():\n    torch.manual_seed(0)\n    model = torch.nn.Linear(4, 6)\n    loss(model(torch.ones(3, 4)), torch.tensor(0.0)).backward()\n"
    script.write_text(head + line + tail)
    (incident,) = new.watched(new.load(script), tmp_path / "runs").incidents
    (diff,) = next(fix.diffs for fix in incident.fixes if len(fix.diffs) == 1 and "n.clamp(min=1e-08)" in str(fix.diffs))
    assert diff.added == (f"    return {wanted}",)


@pytest.mark.parametrize("apart", range(9))
def test_changes_near_each_other_are_one(apart: int, tmp_path: Path) -> None:
    """Each is read off its own statement, and the lines around it may be the other's."""
    lines = [f"line {n}" for n in range(1, 31)]
    script = tmp_path / "a.py"
    script.write_text("\n".join(lines) + "\n")
    found = []
    for first in (10, 11 + apart):
        at = slice(first - 1, first)
        found.append(
            Diff("a.py", first, tuple(lines[at]), ("new", "newer"), tuple(lines[first - 4 : first - 1]), tuple(lines[first : first + 3]))
        )
    copy = patched(script, Fix("x", "", None, True, True, distortion=0.0, diffs=tuple(found)), tmp_path / "copy")
    wanted = [new for line in lines for new in (("new", "newer") if line in ("line 10", f"line {11 + apart}") else (line,))]
    assert copy.read_text().splitlines() == wanted


KEPT = "(mask * weight).sum(-1) / mask.sum(-1)"
PER_ROW = "(mask * log_probs).sum(-1) / mask.sum(-1)"
TRAIN = """

def run():
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 6)
    mask = torch.ones(3, 6)
    mask[1] = 0
    loss(model(torch.ones(3, 4)), torch.ones(3, 6), mask).backward()
"""
GIVEN = "log_probs, weight, mask"
LOSS = f"import torch\n\n\ndef loss({GIVEN}):\n    kept = {KEPT}\n{{}}    per_row = {PER_ROW}\n    return (per_row * kept).mean()\n{TRAIN}"
BESIDE = f"def kept_of({GIVEN}):\n    kept = {KEPT}\n    return kept\n"
USING = f"""import torch
import importlib.util as util
from pathlib import Path

spec = util.spec_from_file_location("beside", Path(__file__).parent / "{{}}")
beside = util.module_from_spec(spec)
spec.loader.exec_module(beside)


def loss({GIVEN}):
    kept = beside.kept_of({GIVEN})
    per_row = {PER_ROW}
    return (per_row * kept).mean()
{TRAIN}"""
MENDED = (f"kept = {KEPT}.clamp(min=1.0)", f"per_row = {PER_ROW}.clamp(min=1.0)")

TWO_PLACES = {  # the files of a project by name, the one that trains first; headers and hunks of the patch
    "one after the other": ({"train.py": LOSS.format("")}, ["--- train.py", "+++ train.py"], 1),
    "near": ({"train.py": LOSS.format("    \n" * 5)}, ["--- train.py", "+++ train.py"], 1),
    "far": ({"train.py": LOSS.format("    \n" * 20)}, ["--- train.py", "+++ train.py"], 2),
    "two files": (
        {"train.py": USING.format("terms.py"), "terms.py": BESIDE},
        ["--- terms.py", "+++ terms.py", "--- train.py", "+++ train.py"],
        2,
    ),
    "two folders": (
        {"train.py": USING.format("my terms/kept.py"), "my terms/kept.py": BESIDE},
        ["--- my terms/kept.py\t", "+++ my terms/kept.py\t", "--- train.py", "+++ train.py"],
        2,
    ),
    "one name": (
        {"train/loss.py": USING.format("../terms/loss.py"), "terms/loss.py": BESIDE},
        ["--- terms/loss.py", "+++ terms/loss.py", "--- train/loss.py", "+++ train/loss.py"],
        2,
    ),
}


def project(files: dict[str, str], root: Path) -> Path:
    """The files of a project, and which of them trains."""
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(text.encode())
    return root / next(iter(files))


@pytest.mark.parametrize("name", TWO_PLACES)
def test_a_fix_at_two_places_is_one_patch(name: str, tmp_path: Path) -> None:
    """With a header for each file, and its changes in order; tools take it whole, and the run is healthy then."""
    files, headers, hunks = TWO_PLACES[name]
    script = project(files, tmp_path / "project")
    (incident,) = new.watched(new.load(script), tmp_path / "runs").incidents
    fix = written_fix(incident)
    assert fix is not None and fix.proven and not fix.rest
    lines = unified(fix).splitlines()
    assert [line for line in lines if line.startswith(("--- ", "+++ "))] == headers
    assert sum(line.startswith("@@") for line in lines) == hunks
    assert [line[1:].strip() for line in lines if line.startswith("+") and not line.startswith("+++")] == list(MENDED)
    copy = patched_all(tmp_path / "project", list(files), fix, tmp_path / "mended")
    assert not new.watched(new.load(copy / next(iter(files))), tmp_path / "after").incidents


@pytest.mark.parametrize("form", [".txt", ".md", ".html"])
def test_a_place_without_a_diff_is_told_in_words_beside_the_other(form: str, tmp_path: Path) -> None:
    """One of the files has other bytes than a patch would quote: what is to be done there is said, and that there is no diff of it."""
    files = {"train.py": USING.format("terms.py"), "terms.py": BESIDE.replace("\n", "\r\n")}
    verdict = new.watched(new.load(project(files, tmp_path / "project")), tmp_path / "runs")
    fix = written_fix(verdict.incidents[0])
    assert fix is not None and fix.proven and len(fix.diffs) == 1
    assert fix.rest == ("clamp mask.sum(-1) to at least 1 before dividing (terms.py:2)",)
    assert [line for line in unified(fix).splitlines() if line.startswith("+")] == ["+++ train.py", f"+    {MENDED[1]}"]
    shown = " ".join(RENDERERS[form](verdict, None).decode().split())
    assert "clamp mask.sum(-1) to at least 1 before dividing (terms.py:2)" in re.sub(r"<[^>]+>|[\\`]", "", shown)
    assert "no diff" in shown


def test_a_fix_that_is_written_whole_goes_before_one_of_which_a_part_is() -> None:
    """Also where that one is the better: it can be applied."""
    part = Fix("x", "", None, True, True, distortion=0.0, diffs=(Diff("a.py", 1, ("a",), ("b",)),), rest=("c",))
    whole = replace(part, id="y", rest=())
    assert written_fix(replace(INCIDENT, fixes=(part, whole))) == whole
    assert written_fix(replace(INCIDENT, fixes=(part,))) == part


PATHS = {  # what two files of one patch are called
    "beside each other": ("/home/me/project/a.py", "/home/me/project/b.py", ["a.py", "b.py"]),
    "below each other": ("/home/me/project/a.py", "/home/me/project/losses/b.py", ["a.py", "losses/b.py"]),
    "of the machine": ("/home/me/project/a.py", "/usr/lib/python3/trl/b.py", ["a.py", "b.py"]),
    "of two people": ("/home/me/a.py", "/home/you/b.py", ["a.py", "b.py"]),
    "out of the folder": ("/home/me/project/a.py", "/home/me/project/../../b.py", ["a.py", "b.py"]),
    "of a container": ("/workspace/a.py", "/workspace/losses/b.py", ["a.py", "losses/b.py"]),
    "of one name": ("/workspace/p/a/loss.py", "/opt/b/loss.py", ["a/loss.py", "b/loss.py"]),
    "of one name in a folder": ("/app/a/loss.py", "/app/b/loss.py", ["a/loss.py", "b/loss.py"]),
    "of one name, at home": ("/home/me/loss.py", "/usr/lib/loss.py", ["loss.py", "lib/loss.py"]),
    "of one name, without a home": ("a/loss.py", "b/loss.py", ["a/loss.py", "b/loss.py"]),
    "without a folder": ("a.py", "b.py", ["a.py", "b.py"]),
}


@pytest.mark.parametrize("name", PATHS)
def test_a_patch_names_files_from_their_folder_and_no_folder_of_the_machine(name: str) -> None:
    """Whose home it is nobody learns from it, and no tool writes outside of the folder that it is called in."""
    *files, names = PATHS[name]
    fix = Fix("x", "", None, True, True, distortion=0.0, diffs=tuple(Diff(str(file), 1, ("a",), ("b",)) for file in files))
    assert [hunk.file for hunk in hunks_of(fix)] == names


def test_two_files_of_one_name_are_two() -> None:
    """Whatever they are called, lines of one are not taken for lines of the other."""
    diffs = tuple(Diff(file, 2, ("a",), ("b",), ("above",), ("below",)) for file in ("/home/me/loss.py", "/usr/lib/loss.py"))
    lines = unified(Fix("x", "", None, True, True, distortion=0.0, diffs=diffs)).splitlines()
    heads = [[f"--- {name}", f"+++ {name}", "@@ -1,3 +1,3 @@", "-a", "+b"] for name in ("loss.py", "lib/loss.py")]
    assert [line for line in lines if line.startswith(("-", "+", "@"))] == [*heads[0], *heads[1]]


GROUPS = """import torch


def loss(log_probs, rewards):
    return -(log_probs * ((rewards - rewards.mean()) / (rewards.std({}) + 1e-4))).mean()


def run():
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    for size in (4, 3, 1):
        loss(model(torch.randn(size, 4)).squeeze(-1), torch.randn(size)).backward()
"""


@pytest.mark.parametrize(("over", "test"), [("", "rewards.numel() > 1"), ("0", "rewards.shape[0] > 1")])
def test_a_guard_for_a_group_of_one_is_for_that_alone(over: str, test: str, tmp_path: Path) -> None:
    """The groups of other steps are larger, and their deviation stays what it was."""
    script = tmp_path / "script.py"
    script.write_text(GROUPS.format(over))
    (incident,) = new.watched(new.load(script), tmp_path / "runs").incidents
    fix = next(fix for fix in incident.fixes if fix.id == "guard_small_group")
    copy = patched(script, fix, tmp_path / fix.id)
    assert f"rewards.std({over}) if {test} else rewards.std({over}{over and ', '}correction=0)" in copy.read_text()
    assert not new.watched(new.load(copy), tmp_path / fix.id / "runs").incidents, copy.read_text()


CALLED = """import torch

CALLS = []


def run():
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 6)
    model.register_forward_hook(lambda *_: CALLS.append(0))
    x, teacher = torch.randn(3, 4), torch.randn(3, 6).softmax(-1)
    teacher[1, 2] = 0.0
    known = torch.log(teacher, out=torch.empty_like(teacher))
    loss = (teacher * (known - model(x).log_softmax(-1))).sum(-1).mean()
    loss.backward()
"""


def test_what_a_fix_writes_twice_is_called_once(tmp_path: Path) -> None:
    """A model that is called a second time draws its dropout anew."""
    script = tmp_path / "script.py"
    script.write_text(CALLED)
    (incident,) = new.watched(new.load(script), tmp_path / "runs").incidents
    fix = next(fix for fix in incident.fixes if "isinf" in str(fix.diffs))
    copy = new.load(patched(script, fix, tmp_path / fix.id))
    assert not new.watched(copy, tmp_path / fix.id / "runs").incidents
    assert len(copy.CALLS) == 1
