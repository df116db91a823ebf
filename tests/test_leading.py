"""Who began a run tells its verdict, of all that took part in it."""

from __future__ import annotations

from pathlib import Path

import pytest

from nanscope.snapshot.coverage import Status
from nanscope.watching import launch
from nanscope.watching.ambience import AMBIENCE
from nanscope.watching.mirror import Mirror

TRAIN = """
import torch
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(2):
    optimizer.zero_grad()
    model(torch.randn(6, 4)).pow(2).mean().backward()
    optimizer.step()
"""


def test_what_others_wrote_is_fetched_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """When the run is over, however often its verdict is asked for; and then this process takes part in none."""
    fetches = []
    fetch = Mirror.fetch
    monkeypatch.setattr(Mirror, "fetch", lambda mirror: (fetches.append(mirror), fetch(mirror))[1])
    (tmp_path / "train.py").write_text(TRAIN)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    ended = launch.run(str(tmp_path / "train.py"), [], module=False, out=f"file://{tmp_path}/store", on_nonfinite="record")
    assert ended.leading is not None and ended.leading.verdict is ended.leading.verdict
    assert ended.leading.verdict.status is Status.HEALTHY and len(fetches) == 1
    assert AMBIENCE.invitation is None and not AMBIENCE.leads
