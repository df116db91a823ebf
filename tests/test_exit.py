"""How `nanscope run` ends where the script has taken away what it needs for that: streams, descriptors, directories."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from nanscope.snapshot.history import read
from nanscope.snapshot.runs import latest

pytestmark = pytest.mark.skipif(os.name == "nt", reason="descriptors are those of Unix")

TRAIN = """
import os, shutil, sys, torch
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(1, 6):
    loss = model(torch.randn(6, 4)).pow(2).mean()
    if step == 2 and "bad" in sys.argv:
        loss = torch.log(loss * 0)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step == 4:
        exec(sys.argv[1])
"""

CLOSE_STREAMS = "sys.stdout.close(); sys.stderr.close()"
TAKEN: dict[str, tuple[str, str, int]] = {  # what the script does, how it trains -> the status
    "all but the streams closed": ("os.closerange(3, 200)", "bad", 3),
    "the same, healthy": ("os.closerange(3, 200)", "", 0),
    "everything closed": ("os.closerange(0, 200)", "bad", 3),
    "streams closed": (CLOSE_STREAMS, "bad", 3),
    "streams closed, healthy": (CLOSE_STREAMS, "", 0),
    "streams closed, a status of its own": (f"{CLOSE_STREAMS}; os.fork and sys.exit(7)", "", 7),
    "another directory": ("os.chdir('/')", "bad", 3),
    "the runs deleted": ("shutil.rmtree('runs')", "bad", 3),
}


@pytest.mark.parametrize(("code", "how", "status"), TAKEN.values(), ids=TAKEN)
def test_a_run_ends_as_it_would_have_and_its_files_are_there(tmp_path: Path, code: str, how: str, status: int) -> None:
    """The status is the script's or the verdict's, nothing of ours is a traceback, and what is named exists."""
    (tmp_path / "train.py").write_text(TRAIN)
    command = [sys.executable, "-m", "nanscope", "run", "--out", "runs", "--json", "v.json", "train.py", code, how]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, env={**os.environ, "COLUMNS": "200"})
    assert done.returncode == status, done.stderr
    assert "Traceback" not in done.stderr and "Exception" not in done.stderr and "lost sys" not in done.stderr
    run_dir = latest(tmp_path / "runs")
    assert run_dir is not None and (tmp_path / "v.json").is_file()
    steps = [entry.step for entry in read(run_dir / "history.rank0.jsonl")]
    assert steps == list(range(1, 5 if status == 7 else 6))
    if status == 3:
        assert {path.name for path in run_dir.iterdir()} >= {"run.json", "report.html", "step-000002.rank0.safetensors"}
    if status == 3 and "range(0" not in code:  # with everything closed there is nobody to tell
        told = [line.split("next  nanscope replay ")[1] for line in done.stderr.splitlines() if "next  nanscope replay" in line]
        assert told == [f"runs/{run_dir.name}/step-000002.rank0.safetensors"] and (tmp_path / told[0]).is_file()
        assert f"wrote runs/{run_dir.name}/report.html" in done.stderr
