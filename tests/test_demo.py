"""The demo: a real run that learns, and then fails by itself at a token that the loss does not count."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from nanscope import __main__ as cli
from nanscope import demo, load, watch
from nanscope.verdict.diagnose import verdict


def test_the_demo_learns_fails_by_itself_and_is_explained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The reward rises, then exp overflows at a padding position; report, picture, snapshot and the next two commands are there.

    Nothing is staged: up to the bad step weights and losses are finite, and the policy has learned something.
    """
    records: list[demo.StepRecord] = []
    monkeypatch.setattr(demo, "train", noting(demo.train, records))
    monkeypatch.setattr(sys, "argv", ["nanscope", "demo", "--out", str(tmp_path / "demo")])
    with pytest.raises(SystemExit) as left:
        cli.main()
    assert left.value.code == 0
    said = capsys.readouterr().err
    for words in ("torch.exp(ref_log_ratio) overflowed", "completion_mask = 0", "✓ best", "nanscope replay", "nanscope run"):
        assert words in said, words
    names = {path.name for path in (tmp_path / "demo" / "latest").iterdir()}
    assert names >= {"report.html", "report.png", "history.rank0.jsonl", "run.json"}
    (snapshot,) = (tmp_path / "demo" / "latest").glob("step-*.safetensors")

    assert math.isnan(records[-1].loss)
    assert all(math.isfinite(record.loss) for record in records[:-1])
    rewards = [record.mean_reward for record in records]
    assert sum(rewards[-10:]) > 2 * sum(rewards[:10])
    (incident,) = verdict([load(snapshot)], [str(snapshot)]).incidents
    assert incident.origin.masked is True and incident.origin.op == "exp"
    assert incident.fixes[0].id == "mask_before_op"


def noting(train: Callable[..., Iterator[demo.StepRecord]], records: list[demo.StepRecord]) -> Callable[..., Iterator[demo.StepRecord]]:
    """The same training, whose steps are also put into this list."""

    def noted(settings: demo.DemoSettings) -> Iterator[demo.StepRecord]:
        for record in train(settings):
            records.append(record)
            yield record

    return noted


def test_a_run_that_stays_healthy_says_so(tmp_path: Path) -> None:
    """A run too short to fail has no incident."""
    with watch(out=tmp_path) as scope:
        assert len(list(demo.train(demo.DemoSettings(steps=4)))) == 4
    assert scope.verdict.healthy
