"""Unmodified TRL, really training: faults at masked tokens are named, healthy runs are left alone, nothing changes by watching."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

trl = pytest.importorskip("trl")

from trl import GRPOTrainer  # noqa: E402
from trl_runs import Fault, FaultyTrainer, make_trainer  # noqa: E402

import nanscope  # noqa: E402
from nanscope.program.numbers import same_bits  # noqa: E402
from nanscope.program.program import Program  # noqa: E402
from nanscope.replay.tries import replay  # noqa: E402


def train(tmp_path: Path, trainer: GRPOTrainer, **options: Any) -> nanscope.Scope:
    with nanscope.watch(trainer, out=tmp_path / "run", **options) as scope:
        trainer.train()
    return scope


def weights_finite(trainer: GRPOTrainer) -> bool:
    return all(bool(torch.isfinite(p).all()) for p in trainer.model.parameters())


@pytest.mark.parametrize(("advantage", "phase"), [(1, "backward"), (-1, "forward")])
def test_a_tool_masked_token_is_named(tmp_path: Path, advantage: Any, phase: str) -> None:
    """A stale old log-prob at a tool token ruins all gradients; the line, the element and the mask are named, and the log corrected."""
    trainer = make_trainer(tmp_path, FaultyTrainer, fault=Fault("tool", advantage), max_steps=2)
    scope = train(tmp_path, trainer)
    (incident,) = scope.verdict.incidents
    origin = incident.origin
    assert (incident.step, incident.phase) == (2, phase)
    assert (origin.op, origin.variable, origin.role) == ("exp", "coef_1", "ratio")
    assert origin.expression == "torch.exp(log_importance_weights)"
    assert origin.index == trainer.planted
    assert origin.shape == trainer.planted_shape
    assert origin.value == math.inf
    assert origin.masked is True
    assert "mask" in (origin.masked_by or "")
    assert incident.snapshot is not None
    again = replay(nanscope.load(incident.snapshot))  # the file alone leads there, too: it holds masks, and no token ids
    assert again.location is not None and (again.location.origin.variable, again.location.origin.index) == ("coef_1", trainer.planted)
    assert all(
        tensor.dtype != torch.int64 or int(tensor.max()) <= 1
        for tensor in nanscope.load(incident.snapshot).tensors.values()
        if tensor.dim()
    )
    assert origin.file is not None and origin.file.endswith("grpo_trainer.py")
    assert origin.line is not None and "coef_1 = torch.exp" in dict(origin.source)[origin.line]
    assert incident.reached["gradients"] == [27, 27]
    assert incident.fixes[0].id == "mask_before_op" and incident.fixes[0].works
    assert {fix.id for fix in incident.rejected if not fix.works} >= {"where_after_op", "nan_to_num_after_op", "clamp_after_op"}
    assert incident.framework == "TRL"
    assert incident.reproduces is True
    (note,) = [note for note in incident.notes if note.slug == "logged_loss"]
    if phase == "forward":
        assert incident.loss is not None and math.isnan(incident.loss)
        assert "logged 0.0" in note.text and "nan" in note.text
        assert [e["loss"] for e in trainer.state.log_history if e.get("step") == 2 and "loss" in e] == [0.0]
    else:
        assert incident.loss is not None and math.isfinite(incident.loss)
        assert "finite" in note.text
    assert not weights_finite(trainer)


@pytest.mark.parametrize("advantage", [1, -1])
def test_a_padding_token_is_harmless(tmp_path: Path, advantage: Any) -> None:
    """The same at a padding token reaches at most the loss: said so, and neither weights nor gradients are blamed."""
    trainer = make_trainer(tmp_path, FaultyTrainer, fault=Fault("padding", advantage), max_steps=3)
    scope = train(tmp_path, trainer)
    assert "weights and gradients stayed clean" in scope.verdict.sentence
    assert weights_finite(trainer)
    if advantage > 0:
        assert scope.verdict.healthy
        assert [note.slug for note in scope.verdict.notes] == ["nonfinite_absorbed"]
        assert not scope.snapshots
    else:
        assert scope.verdict.incidents[0].reached["gradients"][0] == 0
        assert scope.verdict.incidents[0].reached["weights"][0] == 0
        assert scope.verdict.incidents[0].origin.variable == "coef_1"


def test_the_token_is_named_where_it_was_asked_for(tmp_path: Path) -> None:
    """The ids of the completions stand beside the loss, which does not read them; their text comes from the trainer's own tokenizer."""
    trainer = make_trainer(tmp_path, FaultyTrainer, fault=Fault("tool", 1), max_steps=2)
    scope = train(tmp_path, trainer, save_tokens=True)
    (incident,) = scope.verdict.incidents
    tokenizer = trainer.processing_class
    assert incident.token is not None and incident.token.text == tokenizer.convert_ids_to_tokens(incident.token.id)
    (path,) = scope.paths
    assert path is not None
    snapshot = nanscope.load(path)
    (ids,) = [leaf.id for leaf in snapshot.program.leaves if leaf.role == "response_ids"]
    assert int(snapshot.tensors[ids][trainer.planted]) == incident.token.id
    assert snapshot.texts == {token: tokenizer.decode([token]) for token in snapshot.tensors[ids].unique().tolist()}
    assert replay(snapshot).reproduction.holds


def test_skip_keeps_the_weights_and_training_goes_on(tmp_path: Path) -> None:
    """With on_nonfinite="skip" the bad steps do not reach the weights, and the run ends normally."""
    trainer = make_trainer(tmp_path, FaultyTrainer, fault=Fault("tool", 1), max_steps=4)
    scope = train(tmp_path, trainer, on_nonfinite="skip")
    assert weights_finite(trainer)
    assert trainer.state.global_step == 4
    assert scope.skipped == 3
    assert scope.verdict.incidents[0].reached["stepped"] == "skipped"
    assert scope.verdict.incidents[0].reached["weights"][0] == 0


@pytest.mark.parametrize("advantage", [1, -1])
def test_stop_raises_after_the_snapshot_is_written(tmp_path: Path, advantage: Any) -> None:
    """With on_nonfinite="stop" the run ends at the bad step, with clean weights and the snapshot on disk."""
    trainer = make_trainer(tmp_path, FaultyTrainer, fault=Fault("tool", advantage), max_steps=4)
    with pytest.raises(nanscope.NonFiniteError) as caught:
        train(tmp_path, trainer, on_nonfinite="stop")
    assert caught.value.snapshot is not None and Path(caught.value.snapshot).is_file()
    assert caught.value.verdict.incidents[0].origin.variable == "coef_1"
    assert nanscope.load(caught.value.snapshot).reached.stepped == "stopped"
    assert weights_finite(trainer)


@pytest.mark.parametrize("settings", [{}, {"loss_type": "grpo"}, {"beta": 0.04}, {"num_iterations": 1}, {"gradient_accumulation_steps": 2}])
def test_a_healthy_run_is_left_alone(tmp_path: Path, settings: dict[str, Any]) -> None:
    """No incident, no snapshot, one line of history a step; a first loss of 0 with a real gradient included."""
    trainer = make_trainer(tmp_path, **settings)
    scope = train(tmp_path, trainer)
    assert scope.verdict.healthy and not scope.verdict.notes
    assert not list(scope.out.glob("*.safetensors"))
    assert len((scope.out / "history.rank0.jsonl").read_text().splitlines()) == trainer.state.global_step == scope.steps
    assert all(entry.grad_norm and entry.headroom and entry.headroom > 80 for entry in scope.history.entries)


@pytest.mark.parametrize("settings", [{}, {"beta": 0.04, "loss_type": "grpo"}, {"model_config": {"attention_dropout": 0.2}}])
def test_ten_steps_are_bit_identical_with_and_without(tmp_path: Path, settings: dict[str, Any]) -> None:
    """Weights and the state of the generator after ten steps of TRL do not depend on being watched."""
    results = []
    for watched in (False, True):
        trainer = make_trainer(tmp_path / str(watched), max_steps=10, **settings)
        if watched:
            train(tmp_path, trainer)
        else:
            trainer.train()
        results.append([p.detach().clone() for p in trainer.model.parameters()] + [torch.get_rng_state()])
    assert len(results[0]) == len(results[1])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("beta", [0.0, 0.04])
@pytest.mark.parametrize("loss_type", ["dapo", "grpo", "cispo", "bnpo", "dr_grpo"])
def test_the_recorded_program_of_trl_replays_bit_for_bit(
    tmp_path: Path, loss_type: str, beta: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loss and gradient of the recorded program are those of the run, also after a trip through JSON."""
    import json

    from nanscope.watching.recording import Recording
    from nanscope.watching.step import Step

    seen: list[Recording] = []
    original = Step.after_backward

    def after_backward(self: Step, raised: BaseException | None = None) -> None:
        assert self._current is not None
        seen.append(self._current)
        original(self, raised)

    monkeypatch.setattr(Step, "after_backward", after_backward)
    trainer = make_trainer(tmp_path, loss_type=loss_type, beta=beta, max_steps=3)
    train(tmp_path, trainer)
    assert len(seen) == 3
    for recording in seen:
        assert recording.program is not None
        assert 5 < len(recording.program.calls) < 400
        for program in (recording.program, Program.from_json(json.loads(json.dumps(recording.program.to_json())))):
            run = program.execute(recording.tensors)
            assert same_bits(run.values[program.output], recording.loss)
            assert recording.grads
            for leaf, grad in recording.grads.items():
                assert same_bits(run.grads[leaf], grad)


def test_a_saved_and_loaded_step_replays_bit_for_bit(tmp_path: Path) -> None:
    """What is in the file is enough: loss and gradient of the bad step come out again, bit for bit."""
    trainer = make_trainer(tmp_path, FaultyTrainer, fault=Fault("valid", -1), beta=0.04, max_steps=2)
    scope = train(tmp_path, trainer)
    assert scope.paths[0] is not None
    snapshot = nanscope.load(scope.paths[0])
    replayed = replay(snapshot)
    assert replayed.reproduces is True
    assert replayed.reproduction.exact is True
    assert replayed.location is not None and replayed.location.origin.variable in ("coef_1", None)


def test_no_token_ids_and_nothing_over_the_vocabulary_is_saved(tmp_path: Path) -> None:
    """A snapshot holds tokens' log-probs, not tokens; unless asked."""
    trainer = make_trainer(tmp_path, FaultyTrainer, fault=Fault("tool", 1), max_steps=2)
    scope = train(tmp_path, trainer)
    snapshot = nanscope.load(str(scope.paths[0]))
    for leaf in snapshot.program.leaves:
        tensor = snapshot.tensors[leaf.id]
        assert tensor.is_floating_point() or tensor.dim() == 0 or int(tensor.max()) <= 1, leaf
        assert tensor.numel() <= 8 * 64
