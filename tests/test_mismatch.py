"""How far sampler and trainer are apart: told as a plain loop tells it, in every line of a real run, and of a saved step under corrections."""

from __future__ import annotations

import json
import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from recorded import leaf, record
from torch import Tensor

import nanscope
from nanscope import __main__ as cli
from nanscope.objective.bounds import Bounds
from nanscope.objective.mismatch import Mismatch, effect, mismatch_sums
from nanscope.objective.reduction import Masking
from nanscope.objective.settings import Correction, Gate, Level
from nanscope.replay.batch import loss_inputs
from nanscope.replay.correction import sweep_correction
from nanscope.report.history import panels_of_run
from nanscope.report.html import render_html
from nanscope.snapshot.file import save
from nanscope.snapshot.history import read
from nanscope.verdict.run import verdict_of

DELTAS = st.lists(st.floats(-6, 6, width=32), min_size=12, max_size=12)
COUNTED = st.lists(st.booleans(), min_size=12, max_size=12)


@given(DELTAS, COUNTED, st.integers(0, 11))
def test_sums_are_those_of_a_loop(deltas: list[float], counted: list[bool], unscored: int) -> None:
    """Mean, largest, both estimates of the KL, shares and effective sample size, of the counted tokens that the sampler has scored."""
    rollout = torch.full((3, 4), -2.0)
    own = rollout + torch.tensor(deltas).reshape(3, 4)
    rollout.view(-1)[unscored] = math.nan
    mask = torch.tensor(counted).reshape(3, 4)
    found = Mismatch.of(mismatch_sums(own, rollout, mask).tolist())
    kept = [float(d) for i, (d, c) in enumerate(zip((own + 2.0).flatten().tolist(), counted, strict=True)) if c and i != unscored]
    assert (found.tokens, found.unscored) == (len(kept), float(counted[unscored]))
    if not kept:
        assert (found.mean, found.k1, found.k3, found.sample_size) == (None,) * 4
        return
    weights = [math.exp(d) for d in kept]
    expected = {
        "mean": sum(map(abs, kept)) / len(kept),
        "k1": -sum(kept) / len(kept),
        "k3": sum(w - 1 - d for w, d in zip(weights, kept, strict=True)) / len(kept),
        "share_beyond": sum(abs(d) > math.log(2) for d in kept) / len(kept),
        "share_far": sum(abs(d) > math.log(10) for d in kept) / len(kept),
        "sample_size": sum(weights) ** 2 / (len(kept) * sum(w * w for w in weights)),
    }
    for name, value in expected.items():
        assert getattr(found, name) == pytest.approx(value, rel=1e-3, abs=1e-5), name
    assert found.largest == pytest.approx(max(map(abs, kept)), rel=1e-6)


def test_two_micro_batches_are_one_batch() -> None:
    """What is kept are sums: joined they are those of both together."""
    own, rollout = leaf(6, 5).detach(), leaf(6, 5).detach()
    whole, *halves = (Mismatch.of(mismatch_sums(own[rows], rollout[rows], None).tolist()) for rows in (slice(6), slice(2), slice(2, 6)))
    joined = halves[0].joined(halves[1])
    assert all(getattr(joined, name) == pytest.approx(getattr(whole, name), rel=1e-5) for name in Mismatch.__slots__)


BAND = Bounds(0.5, 2.0)
BY_ROW = Correction(level=Level.SEQUENCE_SUM, mask_log_weight=Masking.MULTIPLY, bounds=Bounds(high=2.0))
CORRECTIONS: dict[str, tuple[Correction, float, float]] = {  # with the shares of these four tokens that it leaves out, and truncates
    "tis": (Correction(bounds=Bounds(high=2.0)), 0.0, 0.25),
    "icepop": (Correction(bounds=BAND, drop=True), 0.5, 0.0),
    "sequence, truncated": (BY_ROW, 0.0, 0.5),
    "sequence, left out": (replace(BY_ROW, drop=True), 0.5, 0.0),
    "gate on the mask": (Correction(gates=(Gate(BAND, from_mask=True),), weigh=False), 0.5, 0.0),
}  # fmt: skip


@pytest.mark.parametrize("name", CORRECTIONS)
def test_what_the_correction_in_force_leaves_out(name: str) -> None:
    """Tokens that a weight of 0 or a gate takes out, and tokens whose weight is truncated; masked ones do not count."""
    delta = torch.tensor([[0.1, 3.0, 9.0], [-2.0, 0.2, -9.0]])
    counted = torch.tensor([[True, True, False], [True, True, False]])
    correction, dropped, cut = CORRECTIONS[name]
    found = Mismatch.of(mismatch_sums(delta - 1.0, torch.full((2, 3), -1.0), counted, correction).tolist())
    assert (found.weighed, found.share_dropped, found.share_cut) == (4.0, dropped, cut)


def test_without_a_correction_its_share_is_not_known() -> None:
    """None, and not 0; a weight of the loss tells what is taken out, also where nobody knows why."""
    own, rollout = torch.zeros(2, 2), torch.ones(2, 2)
    assert Mismatch.of(mismatch_sums(own, rollout, None).tolist()).share_dropped is None
    weight = torch.tensor([[0.0], [0.5]])
    assert Mismatch.of(mismatch_sums(own, rollout, None, None, weight).tolist()).share_dropped == 0.5


def test_tokens_in_one_line_have_no_sequences() -> None:
    """A packed batch is weighed by token; by sequence nothing is said of it."""
    own, rollout = torch.tensor([0.0, -1.0, -3.0]), torch.tensor([-3.0, -1.0, -3.0])
    by_token = Mismatch.of(mismatch_sums(own, rollout, None, Correction(bounds=BAND, drop=True)).tolist())
    assert by_token.share_dropped == pytest.approx(1 / 3)
    assert Mismatch.of(mismatch_sums(own, rollout, None, BY_ROW).tolist()).share_dropped is None


def test_the_effect_of_a_correction_is_what_the_objective_multiplies_by() -> None:
    """The weight of each token, and the mask behind the gates."""
    weight, mask = effect(Correction(bounds=BAND), torch.tensor([[0.0, 3.0]]), torch.zeros(1, 2), torch.tensor([[True, False]]))
    assert weight.tolist() == [[1.0, 2.0]] and mask.tolist() == [[1.0, 0.0]]


def off_by(*changes: tuple[int, float]) -> Any:
    """An engine that reports some log-probs wrong: (token, how much too low) of every completion."""

    def spoil(log_probs: list[list[float]]) -> None:
        for row in log_probs:
            for token, change in changes:
                if token < len(row):
                    row[token] -= change

    return spoil


@pytest.fixture(scope="module")
def sampled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of TRL's trainer with log-probs of its sampler, three steps, the last one saved; the second token of each row is 1.5 nats off."""
    pytest.importorskip("trl")
    from trl_runs import SampledTrainer, make_trainer

    folder = tmp_path_factory.mktemp("sampled")
    how = {"vllm_importance_sampling_mode": "token_mask", "vllm_importance_sampling_clip_max": 3.0}
    trainer = make_trainer(folder, SampledTrainer, max_steps=3, num_iterations=1, **how)
    trainer.spoil, trainer.args.use_vllm = off_by((1, 1.5)), True
    with nanscope.watch(trainer, out=folder / "runs", save_steps=[3]) as scope:
        trainer.train()
    assert scope.verdict.healthy and len(scope.saved) == 1, scope.verdict.sentence
    return scope.out


def test_each_line_of_a_trl_run_says_how_far_its_sampler_is_off(sampled: Path) -> None:
    """TRL's loss reads a weight alone; the log-probs stand beside it in the batch, and what its settings leave out is told."""
    entries = read(sampled / "history.rank0.jsonl")
    assert len(entries) == 3
    for entry in entries:
        assert entry.mismatch_max == pytest.approx(1.5, abs=1e-3), entry
        assert 0 < entry.mismatch_mean < 1.5 and entry.mismatch_k3 > 0 and 0 < entry.mismatch_ess < 1  # type: ignore[operator]
        share = entry.mismatch_mean / 1.5  # type: ignore[operator]
        assert entry.mismatch_beyond == pytest.approx(share, rel=1e-3) and entry.mismatch_far == 0.0
        assert entry.mismatch_dropped == pytest.approx(share, rel=1e-3), "e^1.5 is above vllm_importance_sampling_clip_max"
        assert entry.mismatch_k1 == pytest.approx(-entry.mismatch_mean, rel=1e-3)  # type: ignore[operator]


def test_the_page_of_a_healthy_run_has_a_picture_of_it(sampled: Path) -> None:
    """Nothing is wrong with the run, and the drift of its sampler is worth a look."""
    verdict = verdict_of(sampled)
    titles = [panel.title for panel in panels_of_run(verdict.history)]
    assert {"|Δ| between sampler and trainer", "weights against the sampler"} <= set(titles)
    assert "|Δ| between sampler and trainer" in render_html(verdict)


def test_the_saved_step_has_the_log_probs_of_the_sampler(sampled: Path) -> None:
    """Though the loss does not read them; the program runs as before, and the batch by role has them."""
    (path,) = sampled.glob("batch-*.safetensors")
    snapshot = nanscope.load(path)
    inputs = loss_inputs(snapshot)
    assert inputs.rollout_log_probs is not None and inputs.rollout_log_probs.shape == inputs.log_probs.shape
    found = snapshot.program.execute(snapshot.tensors)
    assert snapshot.loss is not None and torch.equal(found.values[snapshot.program.output], snapshot.loss)


def test_the_saved_step_under_corrections(sampled: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Truncated and left out, by token and by sequence: what each does to tokens, weights and gradient; and where the worst tokens are."""
    (path,) = sampled.glob("batch-*.safetensors")
    found = sweep_correction(nanscope.load(path))
    assert found.key == "trl.dapo" and found.worst and all(one.token == 1 for one in found.worst)
    assert all(one.delta == pytest.approx(1.5, abs=1e-3) for one in found.worst)
    assert [token for token, _, _ in found.worst[0].neighbours] == [0, 2, 3, 4]
    trials = {trial.id: trial for trial in found.trials}
    assert trials["none"].change == 0.0 and trials["none"].dropped == 0.0
    assert trials["in force"].in_force and trials["in force"].dropped == pytest.approx(trials["icepop:3"].dropped)
    assert trials["icepop:2"].dropped > 0 and trials["icepop:5"].dropped == 0.0
    assert trials["tis:2"].cut == pytest.approx(trials["icepop:2"].dropped) and trials["tis:5"].cut == 0.0
    assert all(trial.works and trial.change is not None and trial.cosine is not None for trial in found.trials if trial.dropped < 1)
    out = sampled / "sweep.json"
    monkeypatch.setattr(
        sys, "argv", ["nanscope", "replay", str(path), "--sweep", "tis", "--json", str(out), "--png", str(sampled / "m.png")]
    )
    with pytest.raises(SystemExit) as left:
        cli.main()
    shown = capsys.readouterr().out
    assert left.value.code == 0 and "icepop:2" in shown and "→ 1.5 ←" in shown
    told = json.loads(out.read_text())
    assert told["sentence"] == found.sentence and len(told["trials"]) == len(found.trials) and (sampled / "m.png").stat().st_size > 10_000


def test_a_batch_without_a_sampler_says_so(tmp_path: Path) -> None:
    """Nothing to correct against: one clear error, and what to do."""

    def ppo(log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
        ratio = torch.exp(log_probs - old_log_probs)
        return -(ratio * advantages * mask).sum() / mask.sum()

    recorded = record(ppo, leaf(2, 3), leaf(2, 3).detach(), torch.randn(2, 1), torch.ones(2, 3))
    with pytest.raises(nanscope.NanscopeError, match="rollout_log_probs") as raised:
        sweep_correction(nanscope.load(save(recorded.snapshot(), tmp_path)))
    assert raised.value.slug == "missing-role"


def test_a_loss_that_weighs_by_itself_is_read_from_its_own_program(tmp_path: Path) -> None:
    """No framework: the difference that the loss takes is the mismatch, and the sweep has the batch from it."""

    def loss(log_probs: Tensor, old_log_probs: Tensor, rollout_log_probs: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
        weight = torch.exp(old_log_probs - rollout_log_probs).clamp(max=2.0)
        ratio = torch.exp(log_probs - old_log_probs)
        return -(weight * ratio * advantages * mask).sum() / mask.sum()

    own = leaf(2, 3)
    old = own.detach().clone()
    rollout, mask = old - torch.tensor([[0.0, 0.0, 4.0], [0.0, 0.0, 7.0]]), torch.tensor([[1.0, 1.0, 1.0], [1.0, 1.0, 0.0]])
    recorded = record(loss, own, old, rollout, torch.randn(2, 1), mask)
    found = sweep_correction(nanscope.load(save(recorded.snapshot(), tmp_path)), "trl.grpo", use_vllm=True)
    assert (found.mismatch.tokens, found.mismatch.largest) == (5.0, 4.0)
    assert [(one.row, one.token) for one in found.worst] == [(0, 2)]
    assert {trial.id for trial in found.trials} > {"none", "in force", "tis:2", "seq-mask:5", "geo-mask:1.5"}
