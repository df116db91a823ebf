"""The demo: a real run that learns, and then fails by itself at a token that the loss does not count."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path

from nanscope import demo, watch


def test_the_demo_learns_fails_by_itself_and_is_explained(tmp_path: Path) -> None:
    """The reward rises, then exp overflows at a padding position; report, picture, snapshot and the next two commands are there."""
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "nanscope", "demo", "--out", str(tmp_path / "demo")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, env=env)
    assert done.returncode == 0, done.stderr[-2000:]
    names = {path.name for path in (tmp_path / "demo").iterdir()}
    assert names >= {"report.html", "report.png", "history.rank0.jsonl", "run.json"}
    assert any(name.endswith(".safetensors") for name in names)
    for words in ("torch.exp(ref_log_ratio) overflowed", "completion_mask = 0", "✓ best", "nanscope replay", "nanscope run"):
        assert words in done.stderr, words


def test_until_it_fails_everything_is_finite_and_the_reward_rises(tmp_path: Path) -> None:
    """Nothing is staged: up to the bad step weights and losses are finite, and the policy has learned something."""
    records = []
    with watch(out=tmp_path) as scope:
        for record in demo.train(demo.DemoSettings()):
            records.append(record)
            if scope.snapshots:
                break
    assert scope.snapshots and math.isnan(records[-1].loss)
    assert all(math.isfinite(record.loss) for record in records[:-1])
    rewards = [record.mean_reward for record in records]
    assert sum(rewards[-10:]) > 2 * sum(rewards[:10])
    (incident, *_) = scope.verdict.incidents
    assert incident.origin.masked is True and incident.origin.op == "exp"
    assert incident.fixes[0].id == "mask_before_op"


def test_a_run_that_stays_healthy_says_so(tmp_path: Path) -> None:
    """A run too short to fail has no incident."""
    with watch(out=tmp_path) as scope:
        assert len(list(demo.train(demo.DemoSettings(steps=4)))) == 4
    assert scope.verdict.healthy
