"""`nanscope run --check`: each loss of a run is checked when it is first seen, and the run is the same as without."""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import nanscope
from nanscope.foresight.search import check
from nanscope.snapshot.history import read

SCRIPT = """
import torch
from torch import nn

torch.manual_seed(0)
policy = nn.Linear(4, 6)
optimizer = torch.optim.Adam(policy.parameters(), lr=0.1)
for step in range(4):
    tokens = torch.randint(0, 6, (2, 3))
    log_probs = policy(torch.randn(2, 3, 4)).log_softmax(-1).gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
    old_log_probs = torch.tensor([[-1.2, -2.1, -1.7], [-1.9, -1.4, -2.3]])
    ratio = torch.exp(log_probs - old_log_probs)
    loss = -(ratio * torch.tensor([[1.0], [-1.0]])).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print(policy.weight.sum().item().hex(), torch.rand(1).item().hex())
"""


def actor_critic(out: Path, wanted: bool) -> tuple[nanscope.Scope, list[Tensor]]:
    """Four steps of two losses, with dropout, in two micro-batches; the scope, and weights and generator afterwards."""
    torch.manual_seed(1)
    model, critic = nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.2)), nn.Linear(4, 1)
    optimizer = torch.optim.SGD([*model.parameters(), *critic.parameters()], lr=0.1)
    with nanscope.watch(out=out, check=wanted) as scope:
        for _ in range(4):
            optimizer.zero_grad()
            for _ in range(2):
                states = torch.randn(5, 4)
                old_log_probs = -torch.rand(5) - 1
                log_ratio = model(states).log_softmax(-1)[:, 0] - old_log_probs
                ratio = torch.exp(log_ratio)
                policy_loss = -(ratio * torch.randn(5)).mean()
                policy_loss.backward()
                value_loss = (critic(states).squeeze(-1) - torch.randn(5)).square().mean()
                value_loss.backward()
            optimizer.step()
    return scope, [*(p.detach().clone() for p in (*model.parameters(), *critic.parameters())), torch.get_rng_state()]


def test_a_run_that_is_checked_is_the_same_run(tmp_path: Path) -> None:
    """Weights and random numbers, bit by bit; each loss is checked once, whatever the number of its steps and micro-batches."""
    (plain, bare), (asked, watched) = actor_critic(tmp_path / "plain", False), actor_critic(tmp_path / "asked", True)
    assert all(torch.equal(one, other) for one, other in zip(bare, watched, strict=True))
    assert plain.checks == [] and plain.saved == []
    assert len(asked.checks) == 2 and len(asked.saved) == 2 and {found.step for found in asked.checks} == {1}
    assert "log_ratio" in asked.checks[0].reachable[0].line
    assert asked.verdict.healthy and len(read(asked.out / "history.rank0.jsonl")) == 4


def test_what_it_says_is_what_a_check_of_the_saved_step_says(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """One line with the file, and one for a hazard; a note that the verdict keeps."""
    scope, _ = actor_critic(tmp_path, True)
    first = check(nanscope.load(scope.saved[0]))
    assert [hazard.words for hazard in first.hazards] == [hazard.words for hazard in scope.checks[0].hazards]
    lines = [message for message in caplog.messages if "[check]" in message]
    assert first.sentence.rstrip(".") in lines[0] and lines[0].endswith(f"nanscope check {scope.saved[0]}")
    assert lines[1] == f"nanscope [check]: {first.reachable[0].words}" and "ratio = torch.exp(log_ratio), test_beforehand.py:" in lines[1]
    assert [note.slug for note in scope.verdict.notes].count("checked_beforehand") == 2


def test_a_check_that_fails_is_one_warning_and_training_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As any observation of ours that fails: the weights are those of the run without it, and it is said that it is missing."""

    def fails(*args: object) -> None:
        raise RuntimeError("not today")

    _, bare = actor_critic(tmp_path / "plain", False)
    monkeypatch.setattr("nanscope.watching.beforehand.check", fails)
    scope, watched = actor_critic(tmp_path / "asked", True)
    assert all(torch.equal(one, other) for one, other in zip(bare, watched, strict=True))
    assert scope.steps == 4 and scope.checks == [] and caplog.text.count("nanscope [check-failed]") == 1
    assert any(gap.slug == "check-failed" for gap in scope.verdict.gaps)


def test_a_step_that_is_bad_is_left_to_its_verdict(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The first healthy one is checked."""
    weight = torch.zeros(2, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=0.0)
    with caplog.at_level(logging.WARNING), nanscope.watch(out=tmp_path, on_nonfinite="skip", check=True) as scope:
        for offset in (200.0, 1.0, 1.0):
            optimizer.zero_grad()
            torch.exp(weight + offset).mean().backward()
            optimizer.step()
    assert scope.bad_steps == 1 and [found.step for found in scope.checks] == [2]
    assert scope.checks[0].healed == ()


def test_a_script_is_checked_while_it_trains(tmp_path: Path) -> None:
    """From the command line, in a process of its own: it prints what it prints without, and the verdict repeats what was found."""
    (tmp_path / "train.py").write_text(SCRIPT, encoding="utf-8")
    bare = subprocess.run([sys.executable, "train.py"], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    command = [sys.executable, "-m", "nanscope", "run", "--check", "train.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.stdout == bare.stdout and done.returncode == 0, done.stderr
    assert "nanscope [check]: ratio = torch.exp(log_probs - old_log_probs), train.py:12: " in done.stderr
    assert "nanscope [check]: step 1: " in done.stderr and "reachable in training; next: nanscope check nanscope-runs/" in done.stderr
    assert "note: checked beforehand, step 1: " in done.stderr
