"""The callback of transformers and TRL trainers, in real ones."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import left_installed

import nanscope
from nanscope.errors import NanscopeError
from nanscope.snapshot.history import read

pytest.importorskip("trl", reason="trl is not installed")
from trl_runs import Fault, FaultyTrainer, make_trainer

BAD = 3  # the step in which the fault is planted, counted from 1


def callback(tmp_path: Path, **options: Any) -> Any:
    return nanscope.integrations.Callback(out=tmp_path / "runs", **options)


def faulty(tmp_path: Path, *callbacks: Any, **settings: Any) -> Any:
    return make_trainer(tmp_path, FaultyTrainer, fault=Fault("tool", step=BAD - 1), callbacks=list(callbacks), **settings)


def weights(trainer: Any) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in trainer.model.state_dict().items()}


def ours(line: dict[str, Any]) -> dict[str, float]:
    return {name.removeprefix("nanscope/"): value for name, value in line.items() if name.startswith("nanscope/")}


def test_the_trainers_log_has_the_line_of_each_step(tmp_path: Path) -> None:
    """Headroom, extremes, distances and bad steps stand beside the loss, and are those of the history."""
    watching = callback(tmp_path)
    trainer = faulty(tmp_path, watching)
    trainer.train()
    lines = [line for line in trainer.state.log_history if "loss" in line]
    entries = read(watching.scope.out / "history.rank0.jsonl")
    assert [ours(line).get("headroom_nats") for line in lines] == [entry.headroom for entry in entries] and len(lines) == 4
    assert [ours(line).get("log_ratio_max") for line in lines] == [entry.log_ratio_max for entry in entries]
    assert [ours(line)["bad_steps"] for line in lines] == [0, 0, 1, 2]
    assert [ours(line).get("first_bad_step") for line in lines] == [None, None, BAD, BAD]
    assert ours(lines[BAD - 1])["headroom_nats"] < 0 < ours(lines[0])["headroom_nats"]
    assert "overflowed to +inf" in watching.scope.verdict.sentence and watching.scope.verdict.incidents[0].step == BAD


def test_what_happened_between_two_logs_comes_as_its_extremes(tmp_path: Path) -> None:
    """A trainer that logs every fourth step still shows the least headroom of the four."""
    watching = callback(tmp_path)
    trainer = faulty(tmp_path, watching, logging_steps=4)
    trainer.train()
    (line,) = (line for line in trainer.state.log_history if "loss" in line)
    entries = read(watching.scope.out / "history.rank0.jsonl")
    seen = [entry.headroom for entry in entries if entry.headroom is not None]
    assert ours(line)["headroom_nats"] == min(seen) < 0 < max(seen)


def test_an_evaluation_is_left_alone(tmp_path: Path) -> None:
    """Its log has nothing of ours, and takes nothing away from the next one of the training."""
    watching = callback(tmp_path)
    trainer = make_trainer(tmp_path, callbacks=[watching], max_steps=2, num_iterations=1, logging_steps=2, per_device_eval_batch_size=8)
    trainer.eval_dataset, trainer.args.eval_strategy, trainer.args.eval_steps = trainer.train_dataset, "steps", 1
    trainer.train()
    history = trainer.state.log_history
    assert [bool(ours(line)) for line in history] == [False, True, False, False]
    assert ["eval_loss" in line for line in history] == [True, False, True, False] and "train_runtime" in history[3]
    seen = [entry.headroom for entry in read(watching.scope.out / "history.rank0.jsonl") if entry.headroom is not None]
    assert ours(history[1]).get("headroom_nats") == min(seen)


def test_what_the_trainer_reports_to_gets_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`report_to=["tensorboard"]`: the event file of a real run holds the scalars, read back with TensorBoard's own reader."""
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "events"))
    watching = callback(tmp_path)
    faulty(tmp_path, watching, report_to=["tensorboard"]).train()
    events = EventAccumulator(str(tmp_path / "events"))
    events.Reload()
    assert {"train/loss", "train/nanscope/headroom_nats", "train/nanscope/log_ratio_max", "train/nanscope/kl_old"} <= set(
        events.Tags()["scalars"]
    )
    assert [(event.step, event.value) for event in events.Scalars("train/nanscope/bad_steps")] == [(1, 0), (2, 0), (3, 1), (4, 2)]
    headroom = [event.value for event in events.Scalars("train/nanscope/headroom_nats")]
    entries = [entry.headroom for entry in read(watching.scope.out / "history.rank0.jsonl") if entry.headroom is not None]
    assert headroom == pytest.approx(entries, rel=1e-6)


@pytest.mark.parametrize("fault", [False, True], ids=["healthy", "faulty"])
def test_the_run_is_the_same_to_the_bit(tmp_path: Path, fault: bool) -> None:
    """Weights, random numbers and what the trainer logs itself are those of the run without the callback."""
    found = []
    for name, callbacks in (("bare", []), ("watched", [callback(tmp_path)])):
        build = faulty if fault else lambda path, *callbacks: make_trainer(path, callbacks=list(callbacks))
        trainer = build(tmp_path / name, *callbacks)
        trainer.train()
        logged = [(line["step"], str(line["loss"]), str(line["grad_norm"])) for line in trainer.state.log_history if "loss" in line]
        found.append((weights(trainer), torch.get_rng_state(), logged))
    (bare, random, logged), (watched, random_watched, logged_watched) = found
    assert all(torch.equal(bare[name].view(torch.uint8), watched[name].view(torch.uint8)) for name in bare)
    assert torch.equal(random, random_watched) and logged == logged_watched


class Raises(FaultyTrainer):
    """Its data ends in an exception, in the second step."""

    def _compute_loss(self, model: torch.nn.Module, inputs: dict[str, Any]) -> torch.Tensor:
        if self.state.global_step == 1 and self.model.training:
            raise ValueError("no reward today")
        return super()._compute_loss(model, inputs)


def test_nothing_stays_when_training_raises(tmp_path: Path) -> None:
    """The exception is the trainer's own, every hook has gone when it arrives, and the record says what ended the run."""
    watching = callback(tmp_path)
    trainer = make_trainer(tmp_path, Raises, callbacks=[watching])
    with pytest.raises(ValueError, match="no reward today"):
        trainer.train()
    assert left_installed() == []
    assert json.loads((watching.scope.out / "run.json").read_text())["raised"] == "ValueError"
    assert watching.scope.steps == 1


def test_a_trainer_trains_again(tmp_path: Path) -> None:
    """Each `train` is a run of its own."""
    watching = callback(tmp_path)
    trainer = make_trainer(tmp_path, callbacks=[watching], max_steps=1)
    trainer.train()
    first = watching.scope
    trainer.train()
    assert first is not watching.scope and first.out != watching.scope.out and first.steps == watching.scope.steps == 1


def test_one_that_is_added_later_watches_as_well(tmp_path: Path) -> None:
    """It is told of no end that is an exception: the next run takes it down, or whoever asks."""
    watching = callback(tmp_path)
    trainer = make_trainer(tmp_path, Raises)
    trainer.add_callback(watching)
    with pytest.raises(ValueError, match="no reward today"):
        trainer.train()
    assert left_installed()
    raised, watched = trainer.__class__._compute_loss, watching.scope
    try:
        trainer.__class__._compute_loss = FaultyTrainer._compute_loss
        trainer.train()
    finally:
        trainer.__class__._compute_loss = raised
    assert left_installed() == [] and watching.scope is not watched and watching.scope.steps == 4


def test_what_was_asked_for_is_done(tmp_path: Path) -> None:
    """`on_nonfinite="stop"` stops, `"repair"` mends: the options are those of `nanscope.watch`."""
    stopping = callback(tmp_path, on_nonfinite="stop")
    with pytest.raises(nanscope.NonFiniteError, match="overflowed"):
        faulty(tmp_path / "stop", stopping).train()
    assert left_installed() == []
    mending = callback(tmp_path, on_nonfinite="repair")
    trainer = faulty(tmp_path / "repair", mending)
    trainer.train()
    assert mending.scope.repaired == 2 and all(bool(tensor.isfinite().all()) for tensor in weights(trainer).values())


def test_a_wrong_option_is_told_at_once() -> None:
    """Before the model is loaded."""
    with pytest.raises(NanscopeError, match="on_nonfinite"):
        nanscope.integrations.Callback(on_nonfinite="pray")


WITHOUT = """
import sys
sys.modules["transformers"] = None
import nanscope
try:
    nanscope.integrations.Callback()
except nanscope.NanscopeError as error:
    print(error.slug, error)
"""


def test_where_transformers_is_missing_one_line_says_so(tmp_path: Path) -> None:
    """What to install; and `import nanscope` needs none of it."""
    done = subprocess.run([sys.executable, "-c", WITHOUT], capture_output=True, text=True, timeout=120, check=True)
    said = "door-not-installed nanscope.integrations.Callback needs transformers, which is not installed: pip install transformers\n"
    assert done.stdout == said
