"""What is told beside the origin: huge weights, weights that were not kept, steps that trained nothing; and tokens that count by another
number than the one that went wrong."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import nanscope
from nanscope.causes import Cause
from nanscope.replay.initialised import UNWRITTEN
from nanscope.replay.tries import EMPTIED
from nanscope.verdict.incident import Incident, Verdict

ROWS, TOKENS, BAD = 4, 6, 3


def run(out: Path, loss_of: Callable[[Tensor, int], Tensor], optimizer: Any = None, steps: int = 4) -> Verdict:
    """Watch a small loop. loss_of: makes a loss of log-probs, in a step."""
    torch.manual_seed(0)
    policy = nn.Linear(5, 1)
    stepper = optimizer(policy) if optimizer is not None else torch.optim.SGD(policy.parameters(), lr=1e-2)
    with nanscope.watch(policy, stepper, out=out) as scope:
        for step in range(1, steps + 1):
            log_probs = functional.logsigmoid(policy(torch.randn(ROWS, TOKENS, 5)).squeeze(-1))
            loss = loss_of(log_probs, step)
            stepper.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            stepper.step()
    return scope.verdict


def first(verdict: Verdict) -> Incident:
    return verdict.incidents[0]


def notes_of(verdict: Verdict) -> dict[str, str]:
    return {note.slug: note.text for note in (*verdict.notes, *(note for found in verdict.incidents for note in found.notes))}


def spoilt(old: Tensor, step: int) -> Tensor:
    """Log-probs of the sampler, of which one is far off in the bad step."""
    old = old.detach().clone()
    old[3, 2] -= 120.0 if step == BAD else 0.0
    return old


def dual_clip(log_probs: Tensor, step: int) -> Tensor:
    advantages = torch.tensor([1.0, -1.0, 0.5, -0.5])[:, None].expand(ROWS, TOKENS)
    ratio = torch.exp(log_probs - spoilt(log_probs, step))
    upper = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(0.8, 1.2))
    lower = torch.min(-advantages * 3.0, upper)
    return torch.where(advantages < 0, lower, upper).mean()


def softplus(log_probs: Tensor, step: int) -> Tensor:
    x = log_probs - spoilt(log_probs, step)
    return torch.where(x > 20, x, torch.log1p(torch.exp(x))).mean()


def replaced(log_probs: Tensor, step: int) -> Tensor:
    ratio = torch.exp(log_probs - spoilt(log_probs, step))
    return torch.where(torch.isfinite(ratio), ratio, torch.ones_like(ratio)).mean()


@pytest.mark.parametrize("loss", [dual_clip, softplus, replaced], ids=lambda loss: loss.__name__)
def test_a_token_for_which_another_number_stands_counts(loss: Callable[[Tensor, int], Tensor], tmp_path: Path) -> None:
    incident = first(run(tmp_path, loss))
    assert incident.origin.op == "exp" and incident.origin.index == (3, 2)
    assert "does not count" not in incident.sentence and "that the loss counts with another number" in incident.sentence


def test_a_token_that_a_mask_takes_out_by_where_is_masked_by_its_name(tmp_path: Path) -> None:
    mask = torch.ones(ROWS, TOKENS)
    mask[3, 2] = 0.0

    def loss(log_probs: Tensor, step: int) -> Tensor:
        ratio = torch.exp(log_probs - spoilt(log_probs, step))
        return torch.where(mask.bool(), ratio, torch.zeros(())).mean()

    incident = first(run(tmp_path, loss))
    assert incident.origin.masked and "not selected by mask" in (incident.origin.masked_by or "")


@pytest.mark.parametrize("reward", [1.0, 0.0, 0.7])
def test_what_differs_from_its_mean_is_no_mask(reward: float, tmp_path: Path) -> None:
    def loss(log_probs: Tensor, step: int) -> Tensor:
        rewards = torch.full((ROWS,), reward) if step == BAD else torch.rand(ROWS)
        advantages = (rewards - rewards.mean()) * torch.rsqrt(rewards.var(unbiased=False))
        return -(advantages[:, None] * log_probs).mean()

    incident = first(run(tmp_path, loss))
    assert incident.origin.op == "rsqrt" and not incident.origin.masked
    assert "a number that was computed" in incident.sentence


def test_weights_that_have_underflowed_are_no_count(tmp_path: Path) -> None:
    def loss(log_probs: Tensor, step: int) -> Tensor:
        weights = torch.exp(torch.rand(ROWS) * 3 - (200.0 if step == BAD else 1.0))
        weights = weights / weights.sum()
        return -(weights[:, None] * log_probs).mean()

    incident = first(run(tmp_path, loss))
    bounds = [row.label for row in incident.rows if row.id == "clamp_denominator"]
    assert bounds and not any("at least 1 " in label for label in bounds)


def test_a_mask_that_selects_nothing_is_a_count(tmp_path: Path) -> None:
    def loss(log_probs: Tensor, step: int) -> Tensor:
        mask = torch.zeros(ROWS, TOKENS) if step == BAD else torch.ones(ROWS, TOKENS)
        return -(log_probs * mask).sum() / mask.sum()

    incident = first(run(tmp_path, loss))
    assert any("at least 1 " in row.label for row in incident.rows if row.id == "clamp_denominator")


@pytest.mark.parametrize("advantage", [0.7, -0.7])
def test_a_number_in_the_place_of_a_log_prob_is_no_proof_on_either_side_of_a_clip(advantage: float, tmp_path: Path) -> None:
    def loss(log_probs: Tensor, step: int) -> Tensor:
        old = log_probs.detach() - 3.0
        old[3, 2] = float("nan") if step == BAD else old[3, 2]
        ratio = torch.exp(log_probs - 3.0 - old)
        return -torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).mean()

    incident = first(run(tmp_path, loss))
    filled = [row for row in incident.rows if row.id in ("reject_input", "drop_invalid_sample") and row.works]
    assert filled and not any(row.proven for row in filled)


def test_weights_that_an_update_has_thrown_away_are_told(tmp_path: Path) -> None:
    def loss(log_probs: Tensor, step: int) -> Tensor:
        return torch.exp(-log_probs).mean()

    verdict = run(tmp_path, loss, lambda policy: torch.optim.AdamW(policy.parameters(), lr=3e5))
    assert "the learning rate is 3e+05" in notes_of(verdict)["huge_weights"]


def test_of_an_update_that_loses_a_weight_the_operation_is_right(tmp_path: Path) -> None:
    def loss(log_probs: Tensor, step: int) -> Tensor:
        return -log_probs.mean()

    verdict = run(tmp_path, loss, lambda policy: torch.optim.AdamW(policy.parameters(), lr=1.0, weight_decay=1e39), steps=1)
    incident = first(verdict)
    assert incident.origin.op == "mul" and abs(incident.origin.value) == float("inf")
    assert incident.origin.number(0) != 0 and "usual_weight" in notes_of(verdict)
    assert incident.origin.operands[0][0] == "a usual weight" and "mul(a usual weight, " in incident.sentence  # no number as if it were its


def test_a_run_whose_gradients_are_all_0_says_so(tmp_path: Path) -> None:
    verdict = run(tmp_path, lambda log_probs, step: (log_probs * (1.0 if step < 3 else 0.0)).mean(), steps=6)
    assert not verdict.incidents and "since step 3: nothing is trained" in verdict.sentence
    again = run(tmp_path / "again", lambda log_probs, step: (log_probs * (0.0 if 2 < step < 6 else 1.0)).mean(), steps=6)
    assert "nothing is trained" not in again.sentence


def test_of_steps_that_a_scaler_skipped_their_gradients_are_not_called_finite(tmp_path: Path) -> None:
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127, growth_interval=1000)
    with nanscope.watch(model, optimizer, out=tmp_path) as scope:
        for _ in range(8):
            loss = model(torch.randn(6, 4)).square().mean() * 30.0
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
    assert scope.verdict.healthy and "skipped" in scope.verdict.sentence and "gradient or weight" not in scope.verdict.sentence


def test_an_empty_selection_has_no_operand(tmp_path: Path) -> None:
    def loss(log_probs: Tensor, step: int) -> Tensor:
        chosen = log_probs[log_probs > (1.0 if step == BAD else -100.0)]
        return chosen.mean()

    assert first(run(tmp_path, loss)).origin.operands == ()


def test_the_bad_samples_of_a_batch_are_one_fault(tmp_path: Path) -> None:
    """They come in by the same line and are stacked: what leaves one out leaves all of them out, and nothing goes wrong next."""
    torch.manual_seed(0)
    critic = nn.Linear(4, 1)
    optimizer = torch.optim.AdamW(critic.parameters(), lr=1e-3)
    with nanscope.watch(critic, optimizer, out=tmp_path) as scope:
        for step in range(1, 4):
            samples = [np.ones(4, np.float32) * n for n in range(6)]
            for n in (1, 2, 4, 5) if step == BAD else ():
                samples[n][3] = np.nan
            states = torch.stack([torch.from_numpy(sample) for sample in samples])
            loss = critic(states).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    incident = first(scope.verdict)
    (left_out,) = [row for row in incident.rows if row.id == "drop_invalid_sample"]
    assert "the same" not in left_out.label and not left_out.then and left_out.bad == 0, left_out
    assert "second_fault" not in notes_of(scope.verdict)
    (test,) = [row for row in incident.rows if row.kind == "cause"]
    assert test.works and not test.then


@pytest.mark.parametrize(("kept", "cost"), [(0.0, EMPTIED), (1.0, "times as large as what is divided")])
def test_a_bound_below_a_count_of_nothing_does_not_mend_the_weights(kept: float, cost: str, tmp_path: Path) -> None:
    """0/0 for every element of an average that has begun anew: with a bound it is a model of zeros, and one of huge numbers where
    something is kept."""
    torch.manual_seed(0)
    policy, reference = nn.Linear(4, 3), nn.Linear(4, 3).requires_grad_(False)
    shadow = {name: weight.detach().clone() for name, weight in policy.named_parameters()}
    optimizer = torch.optim.SGD(policy.parameters(), lr=1e-2)
    with nanscope.watch(policy, optimizer, out=tmp_path) as scope:
        for step in range(1, 5):
            batch = torch.randn(6, 4)
            with torch.no_grad():
                count = torch.tensor(float(step != BAD))
                for name, weight in reference.named_parameters():
                    weight.copy_(shadow[name] * (kept if step == BAD else 1.0) / count)
                known = reference(batch).log_softmax(-1)
            loss = (policy(batch).log_softmax(-1) - known).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    (bounded,) = [row for row in first(scope.verdict).rows if row.id == "clamp_denominator"]
    assert bounded.works and bounded.cost.endswith(cost) and not bounded.proven


def test_a_row_without_tokens_is_multiplied_by_no_mask_after_that(tmp_path: Path) -> None:
    """The mask has made the mean 0 of which the loss takes the logarithm, and has nothing to do with the infinity."""

    def loss(log_probs: Tensor, step: int) -> Tensor:
        mask = torch.ones_like(log_probs)
        mask[1] = float(step != BAD)
        mean = (log_probs * mask).sum(-1) / mask.sum(-1).clamp(min=1.0)
        return -torch.log1p(-torch.exp(mean)).mean()

    found = first(run(tmp_path, loss))
    assert (found.origin.op, found.cause) == ("log1p", Cause.LOG_ZERO)


def test_what_a_mask_multiplies_need_not_have_overflowed(tmp_path: Path) -> None:
    def loss(log_probs: Tensor, step: int) -> Tensor:
        mask = torch.ones_like(log_probs)
        mask[1, 4] = 0.0
        picked = log_probs.masked_fill((mask == 0) & (step == BAD), float("-inf"))
        return -(picked * mask).sum() / mask.sum()

    found = first(run(tmp_path, loss))
    assert found.cause is Cause.INF_TIMES_ZERO_MASK and "overflows" not in found.sentence and "is infinite" in found.sentence


def test_an_epsilon_that_is_added_is_written_anew(tmp_path: Path) -> None:
    def loss(log_probs: Tensor, step: int) -> Tensor:
        p = log_probs.exp().half()
        p = torch.where(torch.eye(ROWS, TOKENS).bool() & (step == BAD), p / p, p)
        return -torch.log(1 - p + 1e-8).float().mean()

    (diff,) = next(row for row in first(run(tmp_path, loss)).rows if row.id == "representable_eps").diffs
    assert diff.added == ("        return -torch.log(1 - p + 0.0001).float().mean()",)


def test_memory_that_nobody_has_written_to_is_allocated_as_zeros(tmp_path: Path) -> None:
    """And what puts a number in the place of a NaN is no fix of it: the next time it holds another number."""

    def loss(log_probs: Tensor, step: int) -> Tensor:
        old = torch.empty(ROWS, TOKENS)
        for row in range(ROWS - (step == BAD)):
            old[row] = log_probs.detach()[row]
        return torch.exp(log_probs - old).mean()

    filled = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    torch.use_deterministic_algorithms(True)
    try:
        torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]
        found = first(run(tmp_path, loss))
    finally:
        torch.use_deterministic_algorithms(False)
        torch.utils.deterministic.fill_uninitialized_memory = filled  # type: ignore[attr-defined]
    rows = {row.id: row for row in found.rows}
    assert found.fixes[0].id == "initialise_memory" and found.fixes[0].works
    assert [diff.added for diff in rows["initialise_memory"].diffs] == [("        old = torch.zeros(ROWS, TOKENS)",)]
    assert rows["drop_invalid_sample"].cost == UNWRITTEN


def test_an_infinity_is_told_where_it_was_made(tmp_path: Path) -> None:
    """It does no harm there, and none until it meets a mask; also where the file does not hold that part of the program."""

    def loss(log_probs: Tensor, step: int) -> Tensor:
        logits = torch.stack([log_probs, -log_probs], -1).repeat(1, 1, 600)
        logits = logits.index_fill(-1, torch.tensor([7]), float("-inf"))
        picked = logits.log_softmax(-1)[..., 7 if step == BAD else 8]
        mask = (torch.arange(TOKENS) < 3).float().expand(ROWS, TOKENS)
        return -(picked.masked_fill((mask == 1) & (step == BAD), -1.0) * mask).mean()

    found = first(run(tmp_path, loss))
    line = next(n for n, text in enumerate(Path(__file__).read_text(encoding="utf-8").splitlines(), 1) if "logits.index_fill" in text)
    assert f"is −inf since test_beyond.py:{line}: logits.index_fill(" in found.sentence, found.sentence


def test_an_operand_is_called_what_the_line_calls_it(tmp_path: Path) -> None:
    """And not by the name that another function has for it."""
    kept = {"top": torch.zeros(()), "bottom": torch.ones(())}

    def fill(step: int) -> None:
        for v in kept.values():
            v.fill_(float(step != BAD))

    def loss(log_probs: Tensor, step: int) -> Tensor:
        fill(step)
        (upper, lower) = kept
        share = kept[upper] / kept[lower]
        return (log_probs * share).mean()

    assert [name for name, _ in first(run(tmp_path, loss)).origin.operands] == ["kept[upper]", "kept[lower]"]


def test_a_loss_of_ignored_labels_has_no_operand(tmp_path: Path) -> None:
    """It is a mean of nothing: what is not counted is no operand of it."""

    def loss(log_probs: Tensor, step: int) -> Tensor:
        labels = torch.full((ROWS,), -100 if step == BAD else 1)
        return functional.cross_entropy(log_probs, labels)

    found = first(run(tmp_path, loss))
    assert (found.cause, found.origin.operands) == (Cause.EMPTY_MASK_MEAN, ())


def test_a_further_edit_of_another_kind_is_called_what_it_is(tmp_path: Path) -> None:
    torch.manual_seed(0)
    policy = nn.Linear(8, 6)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-3)
    with nanscope.watch(policy, optimizer, out=tmp_path) as scope:
        for step in range(1, 4):
            logits, chosen = policy(torch.randn(5, 8)), torch.randint(1, 6, (5,))
            if step == BAD:
                logits = logits + torch.tensor([float("-inf"), 0, 0, 0, 0, 0])
            p = torch.softmax(logits, -1)
            entropy = -(p * p.log()).sum(-1).mean()
            loss = functional.cross_entropy(logits, chosen) - 0.01 * entropy
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
    labels = [row.label for row in first(scope.verdict).rows if row.id == "stable_function"]
    assert any("before the product" in label and "; and at line" in label for label in labels), labels


def test_a_factor_of_0_that_meets_nothing_but_nan_is_no_coefficient(tmp_path: Path) -> None:
    def loss(log_probs: Tensor, step: int) -> Tensor:
        hidden = (log_probs * (1e30 if step == BAD else 1.0)) ** 2
        hidden = hidden * torch.rsqrt((hidden * hidden).mean(-1, keepdim=True))
        kept = torch.ones(ROWS, TOKENS)
        kept[0, 0] = 0.0
        return (hidden * (kept * 1.25)).mean()

    incident = first(run(tmp_path, loss))
    assert incident.cause == "magnitude_overflow" and "exactly 0" not in incident.sentence


def test_an_infinity_of_the_code_is_not_said_to_have_overflowed(tmp_path: Path) -> None:
    allowed = torch.ones(ROWS, TOKENS)
    allowed[:, 2] = 0.0

    def loss(log_probs: Tensor, step: int) -> Tensor:
        bias = (1 - allowed) * (float("-inf") if step == BAD else -1e9)
        return (log_probs + bias).softmax(-1)[:, 0].mean()

    assert "multiplied by an infinity of the code" in first(run(tmp_path, loss)).sentence


def test_what_an_overflow_goes_back_to_has_the_name_that_it_is_read_by(tmp_path: Path) -> None:
    def loss(log_probs: Tensor, step: int) -> Tensor:
        picked = log_probs.detach().exp().unsqueeze(-1)
        if step == BAD:
            picked[3, 2] = 1.0
        chosen = picked.gather(-1, torch.zeros(ROWS, TOKENS, 1, dtype=torch.int64))[..., 0]
        odds = chosen / (1 - chosen)
        return (odds * log_probs).mean()

    blame = first(run(tmp_path, loss)).blame
    assert blame is None or (blame.name != "loss" and blame.index != (3, 2, 0))


def test_a_second_moment_below_0_was_so_before_the_update(tmp_path: Path) -> None:
    policies: list[nn.Linear] = []

    def adam(policy: nn.Linear) -> torch.optim.Optimizer:
        policies.append(policy)
        made.append(torch.optim.AdamW(policy.parameters(), lr=1e-3))
        return made[0]

    made: list[torch.optim.Optimizer] = []

    def loss(log_probs: Tensor, step: int) -> Tensor:
        if step == BAD:
            made[0].state[policies[0].weight]["exp_avg_sq"][0, 3] = -1.0
        return -log_probs.mean()

    sentence = first(run(tmp_path, loss, adam)).sentence
    assert "exp_avg_sq" in sentence and "below 0, so it was that before the update" in sentence


def test_an_infinite_state_has_not_left_a_range(tmp_path: Path) -> None:
    made: list[tuple[nn.Linear, torch.optim.Optimizer]] = []

    def momentum(policy: nn.Linear) -> torch.optim.Optimizer:
        made.append((policy, torch.optim.SGD(policy.parameters(), lr=1e-3, momentum=0.9)))
        return made[0][1]

    def loss(log_probs: Tensor, step: int) -> Tensor:
        if step == BAD:
            policy, optimizer = made[0]
            optimizer.state[policy.weight]["momentum_buffer"][0, 3] = float("-inf")
        return -log_probs.mean()

    verdict = run(tmp_path, loss, momentum)
    assert "it was not finite before the update" in verdict.sentence and "range" not in verdict.sentence
    assert "infinite_state" not in notes_of(verdict)
