"""`nanscope repro`: the smallest script of bare torch that fails as a saved step did, the same mended, and as a test."""

from __future__ import annotations

import ast
import json
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import new
import pytest
import torch
from bare import run_bare
from recorded import Recorded, leaf, record
from steps import RUNS
from torch import Tensor
from typer.testing import CliRunner

import nanscope
from nanscope.__main__ import app
from nanscope.errors import NanscopeError
from nanscope.program.calls import Call, Ref
from nanscope.program.ops import FLOW
from nanscope.reproduce import alike
from nanscope.reproduce.reproducer import Reproducer
from nanscope.snapshot.file import load, save
from nanscope.snapshot.observation import UNSEEN, Kind, Phase
from nanscope.snapshot.step import Snapshot

pytestmark = pytest.mark.filterwarnings("ignore")  # the steps do what torch warns of

LINES = 25  # of a script, in the middle
FOLDER = Path(__file__).parent / "incidents"
DAY = (
    "aclippo_half_open_bounds",
    "agent_lightning_fillna_lets_nan_through",
    "bnpo_equal_pass_rates",
    "fp16_overflow_linear_attention_state",
    "mpo_11_determinant_ratio",
    "openrlhf_critic_fp16_scores",
    "reinforce_log_of_gathered_softmax",
    "trl_5814_sequence_weight_of_sums",
    "trl_padding_free_block_mask",
    "unlikelihood_nested_where",
)  # fmt: skip - one for each way to shrink, and those that were not shrunk rightly once


def masked(log_probs: Tensor, old_log_probs: Tensor, mask: Tensor, advantages: Tensor) -> Tensor:
    """A loss with a mask that comes too late."""
    log_ratio = log_probs - old_log_probs
    ratio = torch.exp(log_ratio)
    per_token_loss = -ratio * advantages.unsqueeze(1)
    penalty = 0.01 * (log_probs**2).mean()
    return (per_token_loss * mask).sum() / mask.sum() + penalty


def masked_step(rows: int = 4, tokens: int = 6, **changes: object) -> Snapshot:
    """A step of it that fails at one masked token."""
    torch.manual_seed(0)
    old, mask = torch.full((rows, tokens), -1.0), torch.ones(rows, tokens)
    old[rows // 2, tokens - 1], mask[rows // 2, tokens - 1] = -200.0, 0.0
    made = record(masked, leaf(rows, tokens), old, mask, torch.randn(rows))
    return made.snapshot(**changes)


def test_a_step_becomes_a_script_that_fails_alike_on_bare_torch() -> None:
    """One masked token and one that counts are left of 24, in the names of the code; the script ends without an error, for its asserts hold."""
    made = nanscope.reproducer(masked_step())
    assert run_bare([made.script]) == [""]
    assert made.cause == "inf_times_zero_mask"
    assert "torch.exp(" in made.script and "mask" in made.script and "assert torch.isnan(loss)" in made.script
    assert made.numbers <= 8 < made.of_numbers == 3 * 24 + 4
    assert made.script.count("\n") <= LINES
    assert "nanscope" not in made.script and "torch.ops" not in made.script


def test_a_script_whose_fault_is_gone_stops_at_its_assert() -> None:
    """The asserts of the script are about the fault, and not about anything."""
    made = nanscope.reproducer(masked_step())
    mended = made.script.replace("torch.exp(", "torch.tanh(")
    assert mended != made.script
    assert run_bare([mended])[0].startswith("AssertionError")


def test_the_mended_script_passes_and_says_how() -> None:
    """It is the same one with the proven edit put in, and its asserts are that loss and gradients are finite."""
    made = nanscope.reproducer(masked_step())
    assert made.mended is not None and made.fix == "mask_before_op"
    assert "← the fix: fill the operand where the mask is 0" in made.mended
    assert "assert torch.isfinite(loss)" in made.mended
    assert run_bare([made.mended]) == [""]


def test_the_test_is_red_while_the_fault_is_there(tmp_path: Path) -> None:
    """As a test it is expected to fail, strictly; mended it passes, and with the mark left on the mended one pytest complains."""
    made = nanscope.reproducer(masked_step())
    assert made.pytest_mended is not None
    head, mark, rest = made.pytest.partition("@pytest.mark.xfail")
    assert mark
    (tmp_path / "test_red.py").write_text(made.pytest, encoding="utf-8")
    (tmp_path / "test_green.py").write_text(made.pytest_mended, encoding="utf-8")
    left_on = made.pytest_mended.replace("import torch\n", "import pytest\nimport torch\n", 1).replace(
        "def test_", f"{mark}{rest.partition(chr(10))[0]}\ndef test_"
    )
    (tmp_path / "test_mark.py").write_text(left_on, encoding="utf-8")
    (tmp_path / "test_bare.py").write_text(head + rest.partition("\n")[2], encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-rA", str(tmp_path)], capture_output=True, text=True, cwd=tmp_path, timeout=300
    )  # fmt: skip
    said = {
        Path(line.split()[1]).name.partition("::")[0]: line.split()[0]
        for line in done.stdout.splitlines()
        if line.startswith(("XFAIL", "PASSED", "FAILED"))
    }
    assert said == {"test_red.py": "XFAIL", "test_green.py": "PASSED", "test_mark.py": "FAILED", "test_bare.py": "FAILED"}, done.stdout


def test_the_same_step_gives_the_same_script() -> None:
    """Nothing in it hangs on the clock or on chance: the work is counted, and not measured."""
    assert nanscope.reproducer(masked_step()) == nanscope.reproducer(masked_step())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_numbers_at_the_end_of_their_dtype_are_rounded_within_it(dtype: torch.dtype) -> None:
    """Of 65504 or 3.4e38 one digit more is no number any more."""
    high = torch.finfo(dtype).max
    x = torch.full((2, 3), 0.99 * high, dtype=dtype).requires_grad_()
    made = nanscope.reproducer(record(lambda x: (x * x).sum(), x).snapshot())
    assert run_bare([made.script]) == [""]


def test_a_long_loop_is_shrunk() -> None:
    """Of hundreds of calls over tokens a few are left: the ways to let it end early are few, and the work is kept for the others."""

    def loss(x: Tensor, gate: Tensor) -> Tensor:
        h = torch.zeros(2)
        for t in range(120):
            h = (h * gate + torch.exp(x[t])) * 0.5 + 0.1 * h
        return h.sum()

    x = torch.zeros(120, 2)
    x[7, 1] = 95.0
    step = record(loss, x.requires_grad_(), torch.full((2,), 0.5)).snapshot()
    made = nanscope.reproducer(step)
    assert made.of_calls > 400 and made.calls <= 12
    assert run_bare([made.script]) == [""]


def test_a_large_batch_is_cut_first() -> None:
    """Of 512 × 2,048 tokens as few are left as of 4 × 6."""
    made = nanscope.reproducer(masked_step(512, 2048))
    assert made.numbers <= 8 and made.of_numbers > 3_000_000
    assert run_bare([made.script]) == [""]


def test_a_batch_that_takes_all_the_work_is_cut_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here by what an element is said to take: to run the whole once takes more than all the work that there is."""
    monkeypatch.setattr(alike, "ELEMENT", 100.0)
    made = nanscope.reproducer(masked_step(64, 2048))
    assert made.numbers <= 8 and made.of_numbers > 300_000


def test_a_large_batch_that_was_written_to_is_cut_too(tmp_path: Path) -> None:
    """A write is recorded by the places of its elements in the whole tensor, of which a part of the batch has none."""
    torch.manual_seed(0)
    logps = (-torch.rand(128, 1024)).requires_grad_()
    with nanscope.watch(out=tmp_path) as scope:
        ref, mask = logps.detach() + 0.1 * torch.randn(128, 1024), torch.ones(128, 1024, dtype=torch.bool)
        ref[77, -1] = 100.0
        mask[77, -1] = False
        log_ratio = ref - logps
        kl = torch.exp(log_ratio) - log_ratio - 1
        ((kl * mask.float()).sum(1) / mask.float().sum(1)).mean().backward()
    made = nanscope.reproducer(scope.paths[0])
    assert made.numbers <= 8 and made.of_numbers > 250_000
    assert run_bare([made.script]) == [""]


@pytest.mark.parametrize("name", ["forward masked", "backward, finite loss", "input", "history"])
def test_what_a_watched_run_saved_is_reproduced(name: str, tmp_path: Path) -> None:
    """From the file, by its path: forward, backward behind a finite loss, and NaN that came in."""
    with nanscope.watch(out=tmp_path):
        RUNS[name]()
    (path,) = sorted(tmp_path.rglob("step-*.safetensors"))[:1]
    made = nanscope.reproducer(path)
    assert run_bare([made.script, *([made.mended] if made.mended else [])]) == [""] * (2 if made.mended else 1)
    if name == "backward, finite loss":
        assert "assert torch.isfinite(loss)" in made.script and ".grad).all()" in made.script
    if name == "input":
        assert "torch.nan" in made.script and "comes in" in made.script


def elsewhere() -> list[tuple[Snapshot, str]]:
    """Steps of which no script can be made, and a word of why."""
    step = masked_step()
    outside = replace(UNSEEN, outside=True)
    fine = record(masked, leaf(2, 3), torch.full((2, 3), -1.0), torch.ones(2, 3), torch.ones(2)).snapshot()
    return [
        (replace(step, observation=replace(outside, phase=Phase.OPTIMIZER)), "optimizer"),
        (replace(step, observation=replace(outside, phase=Phase.WEIGHTS)), "weight"),
        (replace(step, observation=replace(outside, phase=Phase.FORWARD)), "outside of the program"),
        (replace(step, observation=replace(UNSEEN, kind=Kind.ARRIVED)), "another rank"),
        (replace(step, observation=replace(UNSEEN, kind=Kind.CLIP)), "clipping"),
        (replace(step, program=replace(step.program, calls=(), leaves=())), "no program"),
        (fine, "fine when it is run again"),
    ]


@pytest.mark.parametrize("place", range(7))
def test_where_the_harm_is_not_in_the_loss_one_line_says_so(place: int) -> None:
    """What can be had instead is said, too."""
    step, word = elsewhere()[place]
    with pytest.raises(NanscopeError, match=word) as raised:
        nanscope.reproducer(step)
    assert "nanscope report" in str(raised.value) and "\n" not in str(raised.value)


def test_without_a_fix_the_mended_script_is_refused() -> None:
    """And the plain one is there."""
    made = replace(nanscope.reproducer(masked_step()), mended=None, pytest_mended=None)
    assert made.text() == made.script
    for pytest_too in (False, True):
        with pytest.raises(NanscopeError, match="no fix"):
            made.text(fix=True, pytest=pytest_too)


HOSTILE = (
    "__import__('os').system('touch PWNED')",
    "x\nimport os",
    'x"""\nimport os\n"""',
    "import",
    "print",
    "torch",
    "loss_of",
    "pytest",
    "leaf",
    "__class__",
    "mаsk",
    "ﬁrst",
    "a" * 500,
    "x;y",
    "x#",
    "\u202emask",
    "lambda",
    "match",
    "Exception",
    "x.__globals__",
    "self",
    "",
    "a b",
    "\\",
    "{x}",
)


@pytest.mark.parametrize("name", HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_names_are_inert(name: str) -> None:
    """Whatever a file calls its values, functions, modules and roles, none of it gets into a script, which still runs and fails alike."""
    step = masked_step()
    program = step.program
    sites = tuple(
        replace(site, file=name, function=name, name=name, within=name, expression=name, args=(name, name), source=((1, name),))
        for site in program.sites
    )
    leaves = tuple(replace(one, name=name, made_by=name, role=name) for one in program.leaves)
    calls = tuple(replace(call, module=name) for call in program.calls)
    made = nanscope.reproducer(replace(step, program=replace(program, sites=sites, leaves=leaves, calls=calls, foreign=True)))
    for text in (made.script, made.pytest, made.mended or "", made.pytest_mended or ""):
        holds_only_what_it_may(text)
    assert run_bare([made.script]) == [""]


def holds_only_what_it_may(text: str) -> None:
    """Assert that a script is torch, plain names and numbers: no import, attribute, string or character beside those of ours."""
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            assert {alias.name for alias in node.names} <= {"torch", "pytest"}
        assert not isinstance(node, (ast.ImportFrom, ast.Lambda, ast.Global, ast.Delete, ast.ClassDef, ast.JoinedStr, ast.Await))
        if isinstance(node, (ast.Name, ast.arg)):
            word = node.id if isinstance(node, ast.Name) else node.arg
            assert word.isascii() and len(word) <= 45 and "__" not in word
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                assert word not in ("torch", "pytest", "print", "import", "loss_of")
        if isinstance(node, ast.Attribute):
            assert (not node.attr.startswith("_") or node.attr in FLOW) and node.attr not in ("system", "load", "hub", "package", "utils")
    names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
    stored = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    stored |= {node.arg for node in ast.walk(tree) if isinstance(node, ast.arg)}
    stored |= {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    assert names <= stored | {"torch", "pytest"}


def test_a_word_that_no_operator_takes_is_not_written() -> None:
    """An argument that is a string comes from a short list: a program with another one does not run, and is not written either."""
    step = masked_step()
    calls = [replace(call, kwargs=(("rounding_mode", '"); import os; ("'),)) if call.name == "div" else call for call in step.program.calls]
    assert any(call.kwargs for call in calls)
    with pytest.raises(NanscopeError):
        nanscope.reproducer(replace(step, program=replace(step.program, calls=tuple(calls), foreign=True)))


def test_the_name_of_an_argument_is_one_of_the_operator_s() -> None:
    """And that of an operator one of the whitelist: anything else is an error of the program."""
    step = masked_step()
    for hostile in (
        Call("aten.exp.default", (Ref(2),), (("x=1);import os;(", 1),), (3,)),
        Call("aten.system.default", (Ref(2),), (), (3,)),
    ):
        index = next(n for n, call in enumerate(step.program.calls) if call.name == "exp")
        calls = list(step.program.calls)
        calls[index] = replace(hostile, args=calls[index].args, outs=calls[index].outs)
        with pytest.raises(NanscopeError):
            nanscope.reproducer(replace(step, program=replace(step.program, calls=tuple(calls), foreign=True)))
    assert "system" not in FLOW


def test_the_verb_prints_or_writes(tmp_path: Path) -> None:
    """Without -o the script goes to the output, and what was kept beside it; with -o one line says where it is and what was kept."""
    path = save(masked_step(), tmp_path)
    printed = CliRunner().invoke(app, ["repro", str(path)])
    assert printed.exit_code == 0
    assert printed.stdout == nanscope.reproducer(path).script
    assert "fails alike" in printed.stderr
    target = tmp_path / "repro.py"
    written = CliRunner().invoke(app, ["repro", str(path), "--fix", "--pytest", "-o", str(target)])
    assert written.exit_code == 0 and written.stdout.count("\n") == 1 and "calls, fails alike" in written.stdout
    assert target.read_text(encoding="utf-8") == nanscope.reproducer(path).pytest_mended


@pytest.fixture(scope="module")
def fine_steps() -> Recorded:
    """A spike: everything finite, and a gradient out of all scale."""
    x = torch.tensor([1.0, 1.0 + 2e-7, 3.0]).requires_grad_()
    return record(lambda x: ((x[1] - x[0]).reciprocal() * x[2]).sum(), x)


def test_a_snapshot_in_memory_and_its_file_give_the_same(tmp_path: Path) -> None:
    """The door takes either."""
    step = masked_step()
    assert nanscope.reproducer(step).script == nanscope.reproducer(load(save(step, tmp_path))).script


INCIDENTS = sorted(path for path in FOLDER.glob("*.py") if path.stem not in ("expected", "new"))
CASES = [
    pytest.param(path, id=path.stem, marks=[] if path.stem in DAY else [pytest.mark.nightly])
    for path in INCIDENTS
]  # fmt: skip


@pytest.mark.parametrize("path", CASES)
def test_an_incident_whose_origin_is_in_the_loss_is_reproduced(path: Path, tmp_path: Path) -> None:
    """The script fails alike on bare torch for the same cause, and mended it passes; where the origin lies elsewhere, it is said so."""
    verdict = new.watched(new.load(path), tmp_path)
    first = verdict.incidents[0] if verdict.incidents else None
    if first is None or first.snapshot is None:
        pytest.skip("nothing was saved")
    step = load(Path(first.snapshot))
    try:
        made = nanscope.reproducer(step)
    except NanscopeError as error:
        assert error.slug in ("not-in-the-loss", "fails-no-more", "too-many-numbers")
        assert (
            error.slug != "not-in-the-loss"
            or step.observation.outside
            or not step.program.calls
            or step.observation.kind is not Kind.NONFINITE
        )
        return
    assert made.cause == str(first.cause)
    scripts = [made.script, *([made.mended] if made.mended is not None else [])]
    assert run_bare(scripts) == [""] * len(scripts)
    for text in (made.script, made.pytest, made.mended or "", made.pytest_mended or ""):
        holds_only_what_it_may(text)
    assert isinstance(made, Reproducer) and json.dumps(made.kept) and math.isfinite(made.numbers)
