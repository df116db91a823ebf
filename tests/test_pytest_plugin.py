"""The fixture `nanscope` of the pytest plugin, in a test session of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

TESTS = """
import torch

def naive(log_probs, old_log_probs, advantages, mask):
    ratio = torch.exp(log_probs - old_log_probs)
    return -(ratio * advantages[:, None] * mask).sum() / mask.sum()

def guarded(log_probs, old_log_probs, advantages, mask):
    log_ratio = (log_probs - old_log_probs).masked_fill(mask == 0, 0.0).clamp(-20.0, 20.0)
    return -(torch.exp(log_ratio) * advantages[:, None] * mask).sum() / mask.sum().clamp(min=1)

def test_naive(nanscope):
    nanscope.assert_safe(naive)

def test_guarded(nanscope):
    nanscope.assert_safe(guarded)
"""


def test_a_loss_with_a_hazard_fails_with_its_line_and_one_without_passes(tmp_path: Path) -> None:
    """What fails shows the line, the trigger and the fix."""
    (tmp_path / "test_losses.py").write_text(TESTS, encoding="utf-8")
    plugin = ["-p", "no:nanscope", "-p", "nanscope.integrations.pytest_plugin"]  # also where it is not installed
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", *plugin, "test_losses.py"],
        cwd=tmp_path, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert "1 failed, 1 passed" in done.stdout, done.stdout + done.stderr
    assert "naive is not safe" in done.stdout and "ratio = torch.exp(log_probs - old_log_probs)" in done.stdout
    assert "fix: " in done.stdout and "all of mask is 0" in done.stdout
