"""What a user writes against the public names passes a strict type checker, and what is wrong does not."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

SCRIPT = """
from pathlib import Path

import torch

import nanscope
from nanscope.atlas import atlas
from nanscope.audit import audit, audit_snapshots


def told(incident: nanscope.Incident) -> None:
    print(incident.cause, incident.origin.op, incident.fixes)


def warned(forecast: nanscope.Forecast) -> None:
    print(forecast)


def my_loss(log_probs: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return (log_probs * mask).sum()


model = torch.nn.Linear(2, 1)
with nanscope.watch(model, out=Path("runs"), on_nonfinite="skip", save_steps=[3], on_incident=told, on_warning=warned, check=True) as scope:
    scope.step(1)
    scope.tag(log_probs=torch.zeros(2))
verdict: nanscope.Verdict = scope.verdict
scope.report("report.html")
sentence: str = verdict.sentence
snapshot: nanscope.Snapshot = nanscope.load("step.safetensors")
replayed: nanscope.Replay = nanscope.replay(snapshot, ["clamp:20"])
nanscope.replay(Path("step.safetensors"), "mask")
losses: list[float | None] = [row.loss for row in replayed.rows]
latest: nanscope.Verdict = nanscope.diagnose("runs")
several: nanscope.Verdict = nanscope.diagnose([snapshot, "step.safetensors"])
check: nanscope.Check = nanscope.check(my_loss, {"log_probs": torch.zeros(2, 3)}, dtypes=torch.bfloat16)
check.report(Path("check.sarif"))
inputs: nanscope.LossInputs = nanscope.loss_inputs(snapshot)
others = nanscope.replay_under(snapshot, "verl.vanilla", own=[my_loss, "mine:loss"])
survived: list[str] = [outcome.id for outcome in others.outcomes if outcome.works]
loss: torch.Tensor = nanscope.framework_loss("trl.grpo", inputs, epsilon=0.2).loss
line: str = repr(nanscope.show(loss, None))
bad: int = nanscope.summarise(loss).nonfinite
findings = audit_snapshots([snapshot, "step.safetensors"]).findings + audit([inputs]).findings
rows: int = len(nanscope.history("runs")) + len(check.frame()) + len(replayed.frame()) + len(others.frame()) + len(atlas("trl").frame())
try:
    nanscope.load("x")
except (nanscope.SnapshotError, nanscope.ProgramError, nanscope.NonFiniteError) as error:
    slug: str = error.slug
"""

WRONG = (
    'nanscope.watch(on_nonfinite="stpo")',
    "nanscope.load(3)",
    'nanscope.check(nanscope.load("x"), dtypes="bfloat16")',
    'nanscope.diagnose("x").sentense',
    'nanscope.replay("x", edits=3)',
    'x: int = nanscope.replay("x")',
)


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What mypy says of each script, in one run."""
    folder = tmp_path_factory.mktemp("typed")
    (folder / "right.py").write_text(SCRIPT)
    for number, line in enumerate(WRONG):
        (folder / f"wrong{number}.py").write_text(f"import nanscope\n\n{line}\n")
    (folder / "mypy.ini").write_text("[mypy]\nstrict = true\n[mypy-nanscope.*]\nfollow_imports = silent\n")
    files = [str(path) for path in sorted(folder.glob("*.py"))]
    cache = str(folder / "cache")
    command = [sys.executable, "-m", "mypy", "--config-file", str(folder / "mypy.ini"), "--cache-dir", cache, "--no-error-summary", *files]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)
    assert not done.stderr, done.stderr
    return {Path(file).stem: "".join(line for line in done.stdout.splitlines(True) if line.startswith(f"{file}:")) for file in files}


def test_a_users_script_passes_a_strict_type_checker(said: dict[str, str]) -> None:
    """Every public name has its types, and none is Any where a person would be helped by knowing."""
    assert said["right"] == ""


@pytest.mark.parametrize("number", range(len(WRONG)), ids=WRONG)
def test_a_type_checker_sees_what_is_wrong(said: dict[str, str], number: int) -> None:
    """A misspelt option, a wrong class, a name that is not there: before anything runs."""
    assert "error:" in said[f"wrong{number}"]
