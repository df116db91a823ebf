"""MLflow itself, in a folder: metrics, tag and artifact of a run, read back with its client."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from doors import BAD, STEPS, train

import nanscope
from nanscope.snapshot.history import read

mlflow = pytest.importorskip("mlflow", reason="mlflow is not installed")


@pytest.fixture
def client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A store in a folder."""
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    before = mlflow.get_tracking_uri()
    mlflow.set_tracking_uri((tmp_path / "mlruns").as_uri())
    yield mlflow.MlflowClient()
    while mlflow.active_run() is not None:
        mlflow.end_run()
    mlflow.set_tracking_uri(before)


def history(client: Any, run_id: str, name: str) -> list[tuple[int, float]]:
    return [(metric.step, metric.value) for metric in client.get_metric_history(run_id, f"nanscope/{name}")]


def test_the_active_run_has_every_step_and_the_hit(tmp_path: Path, client: Any) -> None:
    """Although it is active in another thread than the one that writes."""
    with mlflow.start_run() as active:
        _, scope = train([nanscope.integrations.MLflow()], tmp_path, fault=True)
    run_id = active.info.run_id
    known = [(entry.step, entry.headroom) for entry in read(scope.out / "history.rank0.jsonl") if entry.headroom is not None]
    assert history(client, run_id, "headroom_nats") == known
    assert [value for _, value in history(client, run_id, "bad_steps")] == [0, 0, 1, 2, 3] and STEPS == 5
    tags = client.get_run(run_id).data.tags
    assert "overflowed to +inf" in tags[f"nanscope. step {BAD}"]
    assert [found.path for found in client.list_artifacts(run_id, "nanscope")] == [f"nanscope/step-{BAD:06d}.rank0.html"]


def test_a_run_that_begins_after_the_watch_is_found(tmp_path: Path, client: Any) -> None:
    """A trainer starts it when it begins to train; here after the first step."""
    begun: list[str] = []

    def after(step: int, _: Any) -> None:
        if step == 1:
            begun.append(mlflow.start_run().info.run_id)

    train([nanscope.integrations.Live()], tmp_path, after=after)
    assert [step for step, _ in history(client, begun[0], "loss")][-1] == STEPS


def test_without_a_run_none_is_made(tmp_path: Path, client: Any, caplog: pytest.LogCaptureFixture) -> None:
    """One line says what to call."""
    train([nanscope.integrations.MLflow()], tmp_path)
    assert "MLflow has no active run in this process: call mlflow.start_run() first" in caplog.text
    assert client.search_runs(["0"]) == []
