"""trackio itself, on this machine: what its database holds afterwards."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("trackio", reason="trackio is not installed")

SCRIPT = """
import json, sys
from pathlib import Path
import trackio
from trackio.sqlite_storage import SQLiteStorage
sys.path.insert(0, TESTS)
import nanscope
from doors import train

run = trackio.init(project="doors", name="one", auto_log_gpu=False)
train([getattr(nanscope.integrations, TRACKER)()], Path("."), fault=True)
trackio.finish()
logs = SQLiteStorage.get_logs("doors", "one")
print(json.dumps({"rows": logs, "alerts": SQLiteStorage.get_alerts("doors")}, default=str))
"""


@pytest.mark.parametrize("tracker", ["Trackio", "Live"])
def test_the_database_has_every_step_and_the_hit(tmp_path: Path, tracker: str) -> None:
    """In a process of its own: trackio keeps its run in the context, and its folder for as long as it is imported."""
    import json
    import os

    environment = {**os.environ, "TRACKIO_DIR": str(tmp_path / "trackio"), "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    code = f"TESTS, TRACKER = {str(Path(__file__).parent)!r}, {tracker!r}\n{SCRIPT}"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    rows = [row for row in told["rows"] if "nanscope/loss" in row]
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5]
    assert [row["nanscope/bad_steps"] for row in rows] == [0, 0, 1, 2, 3]
    (alert,) = told["alerts"]
    assert alert["title"] == "nanscope: step 3" and "overflowed to +inf" in alert["text"]
