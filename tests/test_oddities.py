"""Steps that are ruined with finite numbers: spikes, clips, and completions of one token."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import nanscope
from nanscope.compare.steps import histories
from nanscope.snapshot.file import load
from nanscope.snapshot.history import read
from nanscope.watching.oddities import Usual, repeated_tokens


def test_the_story_of_the_exclamation_marks(tmp_path: Path) -> None:
    """Step 1 poisons the weights, from step 2 on every log-prob is NaN, and the model emits token 0 for ever: one verdict tells all of it."""
    torch.manual_seed(0)
    policy = nn.Linear(4, 6)
    optimizer = torch.optim.SGD(policy.parameters(), lr=0.1)
    mask = torch.tensor([[1.0, 1.0, 1.0, 1.0, 0.0], [1.0, 1.0, 1.0, 1.0, 1.0]])
    with nanscope.watch(out=tmp_path) as scope:
        for step in range(3):
            logits = policy(torch.ones(2, 5, 4))
            response_ids = logits.detach().nan_to_num(nan=-1.0).argmax(-1) if step else torch.tensor([[1, 2, 3, 4, 5], [0, 1, 2, 3, 4]])
            scope.tag(response_ids=response_ids, mask=mask)
            log_probs = logits.log_softmax(-1).gather(-1, response_ids[..., None]).squeeze(-1)
            old_log_probs = log_probs.detach() - (200.0 if step == 0 else 0.0) * (1 - mask)
            ratio = torch.exp(log_probs - old_log_probs)
            loss = -(ratio * mask).sum() / mask.sum()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    first, second, *_ = scope.verdict.incidents
    assert (first.step, first.cause, first.origin.index) == (1, "inf_times_zero_mask", (0, 4))
    assert (second.step, second.cause) == (2, "poisoned_weights")
    assert "the update of step 1 wrote it there" in second.sentence
    notes = [note.text for note in scope.verdict.notes if note.slug == "repeated_tokens"]
    assert notes and "2 of 2 completions are one token over and over (id 0)" in notes[0]


def test_a_run_has_a_scale_of_its_own_after_a_few_steps() -> None:
    """A large first loss is no finding; later a thousand times the largest is, and nothing below it."""
    usual = Usual()
    for count, size in enumerate((5.0, 2.0, 7.0)):
        assert not usual.exceeded(1e30), count
        usual.add(size)
    assert (usual.largest, usual.count) == (7.0, 3)
    assert usual.exceeded(7001.0) and not usual.exceeded(7000.0)
    small = Usual()
    for _ in range(3):
        small.add(1e-9)
    assert not small.exceeded(1000.0) and small.exceeded(1001.0), "a loss that is nearly 0 has no scale"


REPEATED = [  # ids, mask -> rows that are one token over and over, of how many, and the tokens; None: nothing to say
    ([[0, 0, 0, 0], [0, 0, 0, 0]], None, "2 of 2 completions are one token over and over (id 0)"),
    ([[0, 0, 0, 0], [5, 5, 5, 5], [1, 2, 3, 4]], None, "2 of 3 completions are one token over and over (id 0, 5)"),
    ([[n] * 4 for n in (9, 8, 7, 6)], None, "4 of 4 completions are one token over and over (id 6, 7, 8)"),
    ([[0, 0, 0, 0], [1, 2, 3, 4]], None, None),  # half of them
    ([[0, 0, 0], [0, 0, 0]], None, None),  # too short to tell
    ([[3, 0, 0, 0, 0, 3]], [[0, 1, 1, 1, 1, 0]], "1 of 1 completions are one token over and over (id 0)"),
    ([[3, 7, 7, 7, 7, 9]], [[0, 1, 1, 1, 1, 0]], "1 of 1 completions are one token over and over (id 7)"),
    ([[0, 0, 0, 0, 0, 3]], [[1, 1, 1, 0, 0, 0]], None),  # three that count
    ([[3, 0, 0, 0, 0]], [[0.0], [1.0]], None),  # a mask of another shape says nothing
    ([[0.0, 0.0, 0.0, 0.0]], None, None),  # numbers, and no ids
    ([0, 0, 0, 0], None, None),
    ([[]], None, None),
]  # fmt: skip


@pytest.mark.parametrize(("ids", "mask", "words"), REPEATED)
def test_completions_of_one_token_are_noticed(ids: list[Any], mask: list[Any] | None, words: str | None) -> None:
    """Where most are, among the tokens that count."""
    found = repeated_tokens(torch.tensor(ids), None if mask is None else torch.tensor(mask))
    assert found == (f"{words}: what a model with NaN weights generates" if words else "")


def train(scale: Callable[[int], float], steps: int = 6) -> None:
    """A few steps with a loss of the size that each says."""
    weight = nn.Parameter(torch.tensor([1.0, 2.0]))
    optimizer = torch.optim.SGD([weight], lr=0.0)
    for step in range(1, steps + 1):
        optimizer.zero_grad()
        denominator = torch.tensor([1.0, 1.0 / scale(step)])
        (weight / denominator).sum().backward()
        optimizer.step()


def test_a_spike_is_told_by_how_far_it_is_out_of_scale(tmp_path: Path) -> None:
    """What is divided by a tiny number is the origin; everything is finite, and nothing was cancelled."""
    with nanscope.watch(out=tmp_path) as scope:
        train(lambda step: 1e9 if step == 5 else 1.0)
    (incident,) = scope.verdict.incidents
    assert (incident.step, incident.cause, incident.suspect, incident.origin.op) == (5, "unknown", True, "div")
    assert "times the largest loss of the 4 steps before" in incident.sentence and scope.verdict.status == "suspect"
    assert {(entry.step, entry.bad, entry.nonfinite, entry.ruined) for entry in scope.history.entries if entry.bad} == {
        (5, True, False, "spike")
    }
    (path,) = tmp_path.rglob("step-*.safetensors")
    assert [(entry.nonfinite, entry.ruined) for entry in load(path).history][-1] == (False, "spike")


def test_a_run_with_a_spike_beside_one_without_differs_by_a_spike(tmp_path: Path) -> None:
    """Nothing in it was non-finite, and its history says so."""
    for name, size in (("calm", 1.0), ("spiked", 1e9)):
        with nanscope.watch(out=tmp_path / name):
            train(lambda step: size if step == 5 else 1.0)
    calm, spiked = (read(path) for name in ("calm", "spiked") for path in sorted((tmp_path / name).rglob("history.rank0.jsonl")))
    told = {line.name: (line.step, line.a, line.b) for line in histories(calm, spiked)}
    assert told["ruined"] == (5, None, "spike") and "nonfinite" not in told


def test_a_spike_in_the_first_steps_is_none(tmp_path: Path) -> None:
    """Nor is one that is as large as another before it."""
    with nanscope.watch(out=tmp_path) as scope:
        train(lambda step: 1e9 if step in (2, 5) else 1.0)
    assert scope.verdict.healthy


def test_what_another_optimizer_is_used_to_says_nothing(tmp_path: Path) -> None:
    """A pretraining with small losses, and then a value function of raw scores; or both in turn, of which one spikes."""
    with nanscope.watch(out=tmp_path / "later") as scope:
        train(lambda step: 1.0)
        train(lambda step: 1e6)
    assert scope.verdict.healthy
    large, small = (nn.Parameter(torch.ones(2)) for _ in range(2))
    optimizers = [torch.optim.SGD([one], lr=0.0) for one in (large, small)]
    with nanscope.watch(out=tmp_path / "in turn") as scope:
        for step in range(1, 7):
            for optimizer, weight, scale in zip(optimizers, (large, small), (1e6, 1e6 if step == 5 else 1.0), strict=True):
                optimizer.zero_grad()
                (weight / torch.tensor([1.0, 1.0 / scale])).sum().backward()
                optimizer.step()
    (incident,) = scope.verdict.incidents
    assert incident.suspect and incident.origin.op == "div" and "times the largest loss of the 4 steps before" in incident.sentence


def test_a_clip_that_divides_by_an_infinite_norm_is_found(tmp_path: Path) -> None:
    """All gradients are 0 afterwards, and nothing is non-finite any more."""
    model = nn.Linear(2, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with nanscope.watch(out=tmp_path) as scope:
        model(torch.tensor([[1e25, 2e25]])).sum().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    (incident,) = scope.verdict.incidents
    assert model.weight.grad is not None and not model.weight.grad.any()
    assert (incident.cause, incident.phase, incident.origin.op) == ("inf_grad_norm_clip", "backward", "linalg_vector_norm")
    assert "every gradient exactly 0" in incident.sentence and incident.origin.value == pytest.approx(2e25)


def test_gradients_that_are_0_are_no_clip(tmp_path: Path) -> None:
    """A loss that does not depend on the weights, clipped as ever."""
    weight = nn.Parameter(torch.tensor([1.0]))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    with nanscope.watch(out=tmp_path) as scope:
        (weight * 0.0).sum().backward()
        nn.utils.clip_grad_norm_([weight], 1.0)
        optimizer.step()
    assert scope.verdict.healthy


def test_a_step_that_a_clip_has_lost_is_told_without_a_model(tmp_path: Path) -> None:
    """The norm of finite gradients overflows, and all become 0: of bare weights the loss says which is the largest."""
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    with nanscope.watch(out=tmp_path) as scope:
        for step in range(3):
            loss = (weight * torch.tensor([1.0, 2.0, 3.0]) * (1e25 if step == 2 else 1.0)).sum()
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_([weight], 1.0)
            optimizer.step()
    (incident,) = scope.verdict.incidents
    assert (incident.step, incident.cause, incident.origin.index) == (3, "inf_grad_norm_clip", (2,)), incident.sentence


def test_a_step_that_a_clip_has_lost_is_told_whatever_made_it(tmp_path: Path) -> None:
    """Of a model that gives other numbers when it is run again nobody knows which gradient it was."""

    class Counts(torch.nn.Linear):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return super().forward(x) * (1e25 if self.calls == 3 else 1.0)

    model = Counts(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with nanscope.watch(model, out=tmp_path) as scope:
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.ones(2, 3)).sum().backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
    assert [(one.step, one.cause) for one in scope.verdict.incidents] == [(3, "inf_grad_norm_clip")]
