"""The examples run as they are, healthy and with their fault, which they get in a process of their own."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"


def run(name: str, *args: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    return subprocess.run([sys.executable, str(EXAMPLES / name), *args], capture_output=True, text=True, timeout=300, env=env)


@pytest.mark.parametrize("name", ["plain_loop.py", "trl_grpo.py"])
def test_an_example_is_healthy_without_its_fault(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As they stand, the examples train and nothing is found; in this process, which has loaded what they import."""
    if name.startswith("trl"):
        pytest.importorskip("trl")
    monkeypatch.setattr(sys, "argv", [name, "--out", str(tmp_path / "run")])
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    assert "no non-finite" in capsys.readouterr().out
    assert not list((tmp_path / "run").glob("*/*.safetensors"))


@pytest.mark.parametrize(("name", "variable"), [("plain_loop.py", "ratio"), ("trl_grpo.py", "coef_1")])
def test_an_example_fails_with_its_fault_and_is_explained(tmp_path: Path, name: str, variable: str) -> None:
    """With --fault the verdict names the variable and the masked token, and the snapshot is there."""
    if name.startswith("trl"):
        pytest.importorskip("trl")
    done = run(name, "--fault", "--out", str(tmp_path / "run"))
    assert done.returncode == 0, done.stderr[-2000:]
    assert f"{variable} = torch.exp(" in done.stdout
    assert "that the loss does not count" in done.stdout
    assert list((tmp_path / "run").glob("*/*.safetensors"))
