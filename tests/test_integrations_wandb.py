"""Weights & Biases itself, offline: what a run's own file holds afterwards."""

from __future__ import annotations

import json
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from doors import BAD, STEPS, train

import nanscope
from nanscope.snapshot.history import read

wandb = pytest.importorskip("wandb", reason="wandb is not installed")


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A live run that goes nowhere but into its folder."""
    for name in ("WANDB_DIR", "WANDB_CACHE_DIR", "WANDB_CONFIG_DIR", "WANDB_DATA_DIR", "WANDB_ARTIFACT_DIR"):
        monkeypatch.setenv(name, str(tmp_path / "wandb"))
    (tmp_path / "wandb").mkdir()
    settings = wandb.Settings(mode="offline", silent=True, console="off", x_disable_stats=True, x_disable_meta=True, disable_git=True)
    with wandb.init(project="doors", dir=str(tmp_path / "wandb"), settings=settings) as live:
        yield live


BLOCK, HEAD = 1 << 15, 7  # of W&B's file: blocks of chunks, each with checksum, length and which part of a record it is
WHOLE, LAST = 1, 4


def written(run: Any) -> list[Any]:
    """Finish the run, and return the records of its file, each of them as W&B's own class reads it."""
    from wandb.proto import wandb_internal_pb2

    (file,) = Path(run.dir).parent.glob("*.wandb")
    run.finish()
    for _ in range(600):  # W&B's own process writes it
        found = parsed(file.read_bytes(), wandb_internal_pb2.Record)
        if found and found[-1].WhichOneof("record_type") == "exit":
            break
        time.sleep(0.05)
    return found


def parsed(data: bytes, kind_of_record: Any) -> list[Any]:
    assert data.startswith(b":W&B")
    at, part, found = HEAD, b"", list[Any]()
    while at + HEAD <= len(data):
        if BLOCK - at % BLOCK < HEAD:  # no room for another head: padding
            at += BLOCK - at % BLOCK
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        if at + HEAD + length > len(data):
            break
        part += data[at + HEAD : at + HEAD + length]
        at += HEAD + length
        if kind in (WHOLE, LAST):
            found.append(kind_of_record.FromString(part))
            part = b""
    return found


def rows(records: list[Any]) -> list[dict[str, Any]]:
    """The history of a run."""
    found = [record.history for record in records if record.WhichOneof("record_type") == "history"]
    return [{item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in row.item} for row in found]


def test_the_numbers_go_into_the_rows_of_the_trainer(tmp_path: Path, run: Any) -> None:
    """A trainer with steps of its own loses no row, and each has what happened since the one before, also between two of them."""
    told: list[int] = []

    class Noticed(nanscope.integrations.WandB):  # type: ignore[misc]
        def log(self, step: int, scalars: Any) -> None:
            super().log(step, scalars)
            told.append(step)

    def after(step: int, loss: Any) -> None:
        while step not in told:
            time.sleep(0.01)
        if step % 2 == 0:
            run.log({"train/loss": loss.item()}, step=step)  # dropped by W&B, had we made rows of our own in between

    _, scope = train([Noticed()], tmp_path, fault=True, after=after)
    found = rows(written(run))
    assert [row["_step"] for row in found if "train/loss" in row] == [2, 4]
    assert [row["nanscope/step"] for row in found] == [2, 4, STEPS]  # W&B keeps a row open until a later step comes
    headroom = [entry.headroom for entry in read(scope.out / "history.rank0.jsonl")]
    assert [row["nanscope/headroom_nats"] for row in found[:2]] == [min(headroom[0], headroom[1]), headroom[BAD - 1]]
    assert found[1]["nanscope/first_bad_step"] == BAD < found[1]["nanscope/step"]


def test_rows_of_its_own_where_nobody_else_logs(tmp_path: Path, run: Any) -> None:
    """`rows=True`: each step is one."""
    train([nanscope.integrations.WandB(rows=True)], tmp_path)
    found = [row for row in rows(written(run)) if "nanscope/step" in row]
    assert [row["nanscope/step"] for row in found] == [*range(1, STEPS + 1)]
    assert all(row["nanscope/bad_steps"] == 0 and row["nanscope/headroom_nats"] > 80 for row in found)


def test_a_hit_alerts_and_keeps_the_page(tmp_path: Path, run: Any) -> None:
    """An alert of W&B's with the sentence, and an artifact with the page."""
    train([nanscope.integrations.WandB()], tmp_path, fault=True)
    records = written(run)
    (alert,) = (record.alert for record in records if record.WhichOneof("record_type") == "alert")
    assert alert.title == f"nanscope: step {BAD}" and "overflowed to +inf" in alert.text and alert.level == "ERROR"
    (artifact,) = (record.artifact for record in records if record.WhichOneof("record_type") == "artifact")
    assert artifact.type == "nanscope" and [entry.path for entry in artifact.manifest.contents] == [f"step-{BAD:06d}.rank0.html"]


def test_without_a_run_one_line_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """And the run is watched all the same."""
    _, scope = train([nanscope.integrations.WandB()], tmp_path)
    assert scope.verdict.healthy and "WandB: NanscopeError: W&B has no run in this process: call wandb.init(…) first" in caplog.text


def test_a_live_run_is_found(tmp_path: Path, run: Any) -> None:
    """`Live()` needs no name."""
    train([nanscope.integrations.Live()], tmp_path)
    assert any("nanscope/headroom_nats" in row for row in rows(written(run)))


def test_it_writes_where_trl_does(tmp_path: Path, run: Any) -> None:
    """`report_to=["wandb"]` of a real TRL run: its rows have the callback's numbers, and the tracker adds the alert."""
    pytest.importorskip("trl", reason="trl is not installed")
    from trl_runs import Fault, FaultyTrainer, make_trainer

    callback = nanscope.integrations.Callback(out=tmp_path / "runs", trackers=[nanscope.integrations.Live()])
    fault = Fault("tool", step=BAD - 1)
    make_trainer(tmp_path, FaultyTrainer, fault=fault, callbacks=[callback], report_to=["wandb"]).train()
    records = written(run)
    logged = [row for row in rows(records) if "train/loss" in row]
    assert [row["train/global_step"] for row in logged] == [1, 2, 3, 4]
    assert [row["train/nanscope/bad_steps"] for row in logged] == [0, 0, 1, 2]
    assert [record.alert.title for record in records if record.WhichOneof("record_type") == "alert"] == [f"nanscope: step {BAD}"]
