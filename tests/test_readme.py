"""What the README and the pages show is what happens: Python runs, commands run, and outputs are compared with real ones.

Outputs are compared word for word, but not number for number: the demo's training differs from processor to processor. A line `…` stands for
any number of lines. `pytest tests/test_readme.py --accept` writes real outputs into the pages.
"""

from __future__ import annotations

import difflib
import doctest
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import Result
from recorded import record
from typer.testing import CliRunner

import nanscope
from nanscope.__main__ import app
from nanscope.snapshot.file import save

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
PAGES = [README, *sorted((ROOT / "docs").rglob("*.md"))]
SNAPSHOT = "step-000412.rank0.safetensors"  # as the pages call the file of a bad step

TRAIN = """
import torch
weights = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(weights.parameters(), lr=0.1)
for _ in range(3):
    optimizer.zero_grad()
    weights(torch.ones(2)).sum().backward()
    optimizer.step()
"""

MY_MODULE = """
def mine(log_probs, old_log_probs, advantages, mask):
    ratio = ((log_probs - old_log_probs) * mask).exp()
    return -(ratio * advantages * mask).sum() / mask.sum()
"""


GRPO = """
import torch


def my_loss(log_probs, old_log_probs, advantages, mask):
    ratio = torch.exp(log_probs - old_log_probs)
    clipped = torch.clamp(ratio, 0.8, 1.2)
    per_token_loss = -torch.min(ratio * advantages[:, None], clipped * advantages[:, None])
    return (per_token_loss * mask).sum() / mask.sum()


def guarded_loss(log_probs, old_log_probs, advantages, mask):
    log_ratio = torch.clamp(log_probs - old_log_probs, -20, 20)
    ratio = torch.exp(log_ratio)
    if len(advantages) > 1:
        advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-4)
    return -(ratio * advantages[:, None] * mask).sum() / mask.sum().clamp(min=1)
"""
SAMPLED = 7  # the step whose batch holds what the sampler reported


def corrected(log_probs, rollout_log_probs, advantages, mask):  # type: ignore[no-untyped-def]
    weight = torch.exp(log_probs.detach() - rollout_log_probs).clamp(max=2.0)
    return -(weight * log_probs * advantages * mask).sum() / mask.sum()


@dataclass(frozen=True)
class Block:
    """A fenced block of a page. line: of its first line, from 1."""

    page: Path
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks_of(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    found = re.finditer(r"^```(\w+)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return [Block(page, text.count("\n", 0, block.start(2)) + 1, block[1], block[2]) for block in found]


BLOCKS = [block for page in PAGES for block in blocks_of(page)]
SESSIONS = [ROOT / "docs" / f"{name}.md" for name in ("session", "trackers", "tutorial")]  # each command after the one before it
OUTPUTS = [block for block in BLOCKS if block.language == "text" and block.text.startswith("$ ")]
SHOWN = [block for block in OUTPUTS if block.page not in SESSIONS]
COMMANDS = [
    pytest.param(line.partition("  #")[0].strip(), id=f"{block}: {line.partition('  #')[0].strip()}")
    for block in BLOCKS
    if block.language == "sh"
    for line in block.text.splitlines()
    if line.startswith("nanscope ")
]


@cache
def called(command: str) -> Result:
    """Run a command line of nanscope in the current directory."""
    words = shlex.split(command.replace("FILE", f"nanscope-runs/latest/{SNAPSHOT}"))
    assert words[0] == "nanscope"
    return CliRunner().invoke(app, words[1:])


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with everything that the pages speak of: a bad run, the demo's, the example's, a script and a module."""
    folder = tmp_path_factory.mktemp("pages")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.delenv("COLUMNS", raising=False)
        assert called("nanscope demo").exit_code == 0
    (demo,) = (folder / "nanscope-demo" / "latest").glob("step-*.safetensors")
    shutil.copytree(folder / "nanscope-demo", folder / "nanscope-runs", symlinks=True)
    shutil.copy(demo, folder / "nanscope-runs" / "latest" / SNAPSHOT)
    shutil.copy(demo, folder / SNAPSHOT)
    (folder / "train.py").write_text(TRAIN)
    (folder / "mymodule.py").write_text(MY_MODULE)
    (folder / "grpo.py").write_text(GRPO)
    log_probs = -torch.rand(3, 5)
    batch = (log_probs + 0.1 * torch.randn(3, 5), torch.tensor([[1.0], [-0.5], [0.3]]), torch.ones(3, 5))
    save(record(corrected, log_probs.requires_grad_(), *batch).snapshot(step=SAMPLED), folder)
    return folder


@pytest.fixture
def workplace(prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The prepared folder, fresh, as the current directory."""
    folder = tmp_path / "work"
    shutil.copytree(prepared, folder, symlinks=True)
    monkeypatch.chdir(folder)
    monkeypatch.delenv("COLUMNS", raising=False)
    return folder


class Trainer:
    """Trains, healthily."""

    def __init__(self) -> None:
        self.model = torch.nn.Linear(2, 1)

    def train(self) -> None:
        exec(TRAIN, {})


def tokens_at(loss: float, count: int) -> nanscope.LossInputs:
    """A row of tokens whose loss is the same at each."""
    log_probs = torch.full((1, count), -1.0)
    return nanscope.LossInputs(log_probs, log_probs - 1e-6, None, None, torch.tensor([-loss]), torch.ones(1, count))


def names() -> dict[str, Any]:
    """What the pages take for granted."""
    log_probs = torch.full((2, 3), -1.0, requires_grad=True)
    others = {f"{name}_log_probs": log_probs.detach() - 0.1 for name in ("old", "ref", "rollout")}
    return {
        "nanscope": nanscope,
        "trainer": Trainer(),
        **others,
        "log_probs": log_probs,
        "advantages": torch.ones(2, 3),
        "mask": torch.ones(2, 3),
        "lp": log_probs,
        "m": torch.ones(2, 3),
        "first": tokens_at(0.5, 100),
        "second": tokens_at(0.3, 900),
    }


@pytest.mark.parametrize(
    "page", [page for page in PAGES if any(b.language.startswith("py") for b in blocks_of(page))], ids=lambda p: p.name
)
def test_the_python_of_a_page_runs(page: Path, workplace: Path) -> None:
    """From top to bottom, and what is shown after `>>>` comes out."""
    known = names()
    for block in blocks_of(page):
        if block.language == "python":
            exec(compile(block.text, str(block), "exec"), known)
        elif block.language == "pycon":
            example = doctest.DocTestParser().get_doctest(block.text, known, str(block), str(page), block.line)
            runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
            assert runner.run(example).failed == 0, block


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_of_a_page_runs(command: str, workplace: Path) -> None:
    """It is healthy or has found something; it is no error and no wrong usage."""
    called.cache_clear()
    result = called(command)
    assert result.exit_code in (0, 3), (result.exception, result.output)


def told(lines: list[str]) -> Counter[str]:
    """The words, without their numbers: those, and with them where lines break, differ between machines."""
    return Counter(re.sub(r"[−+±-]?\d[\d,]*(?:\.\d+)?(?:e[−+-]?\d+)?", "#", " ".join(lines)).split())


def pieces(lines: list[str]) -> list[list[str]]:
    """What stands between lines of `…`."""
    found: list[list[str]] = [[]]
    for line in lines:
        if line.strip() == "…":
            found.append([])
        else:
            found[-1].append(line)
    return found


def is_in(real: list[str], shown: list[str]) -> bool:
    """Are all pieces there, one after the other, the first at the beginning and the last at the end?"""
    at, parts = 0, pieces(shown)
    for number, piece in enumerate(parts):
        starts = range(at, len(real) + 1) if number else [0]
        ends = [end for start in starts for end in range(start, len(real) + 1) if told(real[start:end]) == told(piece)]
        if not ends or (number == len(parts) - 1 and piece and max(ends) < len(real)):
            return False
        at = min(ends)
    return True


def real_for(real: list[str], shown: list[str]) -> list[str]:
    """The same pieces out of a real output: each begins at the line most like its first one and is as long as it was."""
    found: list[str] = []
    at = 0
    for number, piece in enumerate(pieces(shown)):
        found += ["…"] * (number > 0)
        if piece:
            alike = [difflib.SequenceMatcher(None, line, piece[0]).ratio() for line in real[at:]]
            at += alike.index(max(alike))
            found += [line.rstrip() for line in real[at : at + len(piece)]]
            at += len(piece)
    return found


@pytest.mark.parametrize("block", SHOWN, ids=str)
def test_the_output_that_a_page_shows_comes_out(block: Block, workplace: Path, request: pytest.FixtureRequest) -> None:
    """Word for word, for the commands that a page begins a block with."""
    command = block.text.splitlines()[0]
    if "trl-runs" in command:
        pytest.importorskip("trl")
        example = [sys.executable, str(ROOT / "examples" / "trl_grpo.py"), "--fault", "--out", "trl-runs"]
        subprocess.run(example, check=True, capture_output=True, timeout=300)
    result = called(command.removeprefix("$ "))
    compare(block, result.output, request.config.getoption("--accept", default=False))


def compare(block: Block, output: str, accept: bool) -> None:
    """Is the output what the block shows? accept: make it so."""
    command, *shown = block.text.splitlines()
    real = [line.rstrip() for line in output.splitlines()]
    if accept:
        text = block.page.read_text(encoding="utf-8")
        new = "\n".join([command, *real_for(real, shown), ""])
        block.page.write_text(text.replace(block.text, new), encoding="utf-8")
    else:
        assert is_in(real, shown), f"{block} shows something else; accept it with --accept\n{output}"


NEEDS = {"trackers": "trl", "tutorial": "wandb"}
PROGRAMS = {"nanscope": [sys.executable, "-m", "nanscope"], "python": [sys.executable], "patch": ["patch"]}


@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch was built without torch.distributed")
@pytest.mark.parametrize("page", SESSIONS, ids=lambda page: page.stem)
def test_a_session_goes_as_it_is_shown(page: Path, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """Each command after the one before it, in processes of their own."""
    if page.stem in NEEDS:
        pytest.importorskip(NEEDS[page.stem])
    if page.stem == "tutorial" and not shutil.which("patch"):
        pytest.skip("patch is not installed")
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environ = {**os.environ, "PYTHONUNBUFFERED": "1", "COLUMNS": "120", "PATH": path, "WANDB_MODE": "offline"}
    for block in (block for block in OUTPUTS if block.page == page):
        name, *words = shlex.split(block.text.splitlines()[0].removeprefix("$ "))
        ran = subprocess.run(
            [*PROGRAMS[name], *words],
            cwd=tmp_path,
            env=environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=300,
            check=False,
        )
        compare(block, ran.stdout, request.config.getoption("--accept", default=False))


def test_a_shown_output_that_is_wrong_is_noticed() -> None:
    """Another word, another order or a line more; but not another number or another break."""
    real = ["a is 1", "b is", "2 and c", "d"]
    assert is_in(real, ["a is 7", "b is 2 and", "c d"]) and is_in(real, ["a is 1", "…", "d"]) and is_in(real, ["…", "2 and c", "…"])
    assert not is_in(real, ["a was 1", "…"]) and not is_in(real, ["…", "d", "…", "a is 1"]) and not is_in(real, ["a is 1", "d"])
    assert real_for(real, ["a was 3", "…", "b was"]) == ["a is 1", "…", "b is"]


def test_the_readme_sells_on_two_screens() -> None:
    """At most 150 lines, with the two commands that a newcomer copies."""
    lines = README.read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 150
    assert "    pip install -e . -c tests/constraints.txt && nanscope demo" in lines
    assert "    pip install -e '.[test]' -c tests/constraints.txt && pytest" in lines
