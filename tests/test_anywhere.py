"""A snapshot and a history are read from wherever they are."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from test_fetched import NUMBER

import nanscope
from nanscope.errors import NanscopeError, SnapshotError
from nanscope.snapshot.remote import Remote


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run directory with one bad step."""
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with nanscope.watch(out=tmp_path) as scope:
        for step in range(2):
            optimizer.zero_grad()
            (model(torch.ones(1, 2)).sum() * (float("nan") if step else 1.0)).backward()
            optimizer.step()
    return scope.out


def test_what_lies_at_an_address_is_read_as_on_a_disk(run: Path) -> None:
    """A snapshot by its address, the history of a run and of a folder of runs; what is read stays when the block is over."""
    pytest.importorskip("pandas")
    remote = Remote(f"memory://anywhere-{next(NUMBER)}/runs")
    (remote / "a").put("history.rank0.jsonl", b"")
    for path in run.iterdir():
        (remote / run.name).put(path.name, path)
    (file,) = run.glob("step-*.safetensors")
    there, here = nanscope.load(f"{remote.url}/{run.name}/{file.name}"), nanscope.load(file)
    assert there.run == here.run and there.tensors.keys() == here.tensors.keys()
    assert all(there.tensors[name].equal(here.tensors[name]) for name in here.tensors)
    assert nanscope.history(f"{remote.url}/{run.name}").equals(nanscope.history(run)) and len(nanscope.history(run)) == 2
    remote.put("latest", f"{run.name}\n".encode())
    assert nanscope.history(remote.url).equals(nanscope.history(run))


def test_what_is_not_there_is_one_error(tmp_path: Path) -> None:
    """Which names what was asked for."""
    for where in ("memory://anywhere-nowhere/runs", str(tmp_path)):
        with pytest.raises(NanscopeError, match=where):
            nanscope.history(where)
    with pytest.raises(NanscopeError, match="memory://anywhere-nowhere/a.safetensors"):
        nanscope.load("memory://anywhere-nowhere/a.safetensors")
    with pytest.raises(SnapshotError, match="a.safetensors"):
        nanscope.load(tmp_path / "a.safetensors")
