"""Diagnosing: the snapshots of a run become one verdict, each with what its file holds, what the process saw, and what the others tell."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from recorded import leaf, record
from seen import INF, NAN, seen
from torch import Tensor, nn

import nanscope
from nanscope.causes import Cause
from nanscope.locate.observe import observe_made
from nanscope.program.program import Program
from nanscope.snapshot.coverage import Status
from nanscope.snapshot.observation import TEST, Kind, Observation, Phase, Row
from nanscope.snapshot.step import Reached, Snapshot
from nanscope.verdict.diagnose import diagnose, examine, verdict
from nanscope.verdict.incident import Note
from nanscope.watching.afterwards import arrived

MASK = torch.tensor([[1.0, 1.0, 0.0], [1.0, 1.0, 1.0]])
POISONED = observe_made("parameter", torch.tensor([0.5, NAN]), 1, None, "", Phase.WEIGHTS, "lm_head.weight")
ARRIVED = arrived("lm_head.weight", torch.tensor([0.5, NAN]))
TRIED = (
    Row("as_recorded", "as recorded", "recorded", NAN, 3, 3, None, False),
    Row("upcast_fp32", "in float32", "fix", 0.5, 0, 3, 0.0, True),
)


def masked_loss(log_ratio: Tensor) -> Tensor:
    ratio = torch.exp(log_ratio)
    return (ratio * MASK).sum() / MASK.sum()


def overflowing(**changes: Any) -> Snapshot:
    """A step whose file holds everything: exp overflows at a masked token."""
    log_ratio = leaf(2, 3)
    with torch.no_grad():
        log_ratio[0, 2] = 99.0
    return record(masked_loss, log_ratio).snapshot(**changes)


def outside(observation: Observation, **changes: Any) -> Snapshot:
    """A step of which the file holds no program."""
    fields: dict[str, Any] = {"step": 7, "rank": 0, "loss": None, "grads": {}, "reached": Reached(NAN, 3, 3), **changes}
    return Snapshot(program=Program((), (), -1), tensors={}, observation=observation, **fields)


def test_a_step_whose_file_holds_it_is_explained_from_its_program() -> None:
    """Origin, cause, fix, picture and all: nothing of it was seen in the process."""
    incident = diagnose(overflowing(), "a.safetensors")
    assert (incident.step, incident.rank, incident.phase, incident.cause) == (7, 0, "forward", Cause.INF_TIMES_ZERO_MASK)
    assert (incident.origin.variable, incident.origin.index, incident.origin.masked) == ("ratio", (0, 2), True)
    assert incident.fixes[0].id == "mask_before_op" and incident.reproduces is True and incident.snapshot == "a.safetensors"
    assert incident.picture is not None and (incident.picture.row, incident.picture.column) == (0, 2)
    assert incident.rows[0].id == "as_recorded" and not incident.suspect and incident.loss is not None and math.isnan(incident.loss)
    assert incident.reached == {"loss": True, "gradients": [1, 1], "weights": [None, None], "stepped": "taken"}


NOTHING: dict[str, tuple[Callable[[Tensor], Tensor], Cause]] = {
    "where, a number": (lambda x: torch.where(torch.zeros(2, 3).bool(), x, 0.0).sum() / 0, Cause.EMPTY_MASK_MEAN),
    "where, a count": (lambda x: -torch.where(torch.zeros(2, 3).bool(), x, 0.0).sum() / torch.tensor(0.0), Cause.EMPTY_MASK_MEAN),
    "product, a number": (lambda x: (x * torch.zeros(2, 3, dtype=torch.long)).sum() / 0, Cause.EMPTY_MASK_MEAN),
    "product, a count": (lambda x: (x * (loss_mask := torch.zeros(2, 3))).sum() / (0 * loss_mask.new_ones(())), Cause.EMPTY_MASK_MEAN),
    "no advantage": (lambda x: (x * torch.zeros(2, 3)).sum() / 0, Cause.ZERO_DENOMINATOR),
    "something counts": (lambda x: torch.where(MASK.bool(), x * 0, 0.0).sum() / 0, Cause.ZERO_DENOMINATOR),
}


@pytest.mark.parametrize("what", NOTHING)
def test_a_mean_over_nothing_is_one_whoever_has_counted_that(what: str) -> None:
    """The count came from all ranks, or as a number: that the mask lets nothing through is the cause, and not a setting of 0."""
    loss, cause = NOTHING[what]
    assert diagnose(record(loss, leaf(2, 3)).snapshot(), "a.safetensors").cause is cause


POWERS: dict[str, tuple[Callable[[Tensor], Tensor], float, Cause, str | None]] = {  # with the number that x is at [0, 1], and the fix
    "0 to a negative power": (lambda x: (0.0**x).sum(), -2.0, Cause.ZERO_DENOMINATOR, None),
    "0 to a negative power, tensors": (lambda x: (torch.zeros(2, 3) ** x).sum(), -2.0, Cause.ZERO_DENOMINATOR, None),
    "x to a negative power": (lambda x: (x**-2.0).sum(), 0.0, Cause.ZERO_DENOMINATOR, "clamp_input"),
    "2 to the x": (lambda x: (2.0**x).sum(), 200.0, Cause.EXP_OVERFLOW, "clamp_exponent"),
    "2 to the x, tensors": (lambda x: (torch.full((2, 3), 2.0) ** x).sum(), 200.0, Cause.EXP_OVERFLOW, "clamp_exponent"),
    "a half to the x": (lambda x: (0.5**x).sum(), -200.0, Cause.EXP_OVERFLOW, "clamp_exponent"),
    "a large number to the x": (lambda x: (1e5**x).sum(), 9.0, Cause.EXP_OVERFLOW, None),
    "2 to the x, in half precision": (lambda x: (2.0 ** x.half() * 1e-3).sum(), 20.0, Cause.FP16_OVERFLOW, "upcast_fp32"),
    "exp2, in half precision": (lambda x: (torch.exp2(x.half()) * 1e-3).sum(), 20.0, Cause.FP16_OVERFLOW, "upcast_fp32"),
    "x to the 3": (lambda x: (x**3.0).sum(), 1e20, Cause.MAGNITUDE_OVERFLOW, "clamp_input"),
    "x to the 3, tensors": (lambda x: (x ** torch.full((2, 3), 3.0)).sum(), 1e20, Cause.MAGNITUDE_OVERFLOW, "clamp_input"),
    "x to a half": (lambda x: (x**0.5).sum(), -4.0, Cause.SQRT_NEGATIVE, "clamp_input"),
    "x to a half, tensors": (lambda x: (x ** torch.full((2, 3), 0.5)).sum(), -4.0, Cause.SQRT_NEGATIVE, "clamp_input"),
    "a negative number to the x": (lambda x: ((-2.0) ** x).sum(), 0.5, Cause.SQRT_NEGATIVE, None),
    "a negative number to a whole x": (lambda x: (torch.full((2, 3), -2.0) ** x).sum(), 2.0, Cause.LOG_ZERO, None),
    "1 // 0": (lambda x: (x.exp() * torch.floor_divide(torch.ones(2, 3), x.detach())).sum(), 0.0, Cause.ZERO_DENOMINATOR, None),
    "a remainder by 0": (lambda x: torch.fmod(x, 0.0).sum(), 1.0, Cause.ZERO_DENOMINATOR, None),
    "a tiny number divides": (lambda x: (x / 1e-30).sum(), 1e20, Cause.MAGNITUDE_OVERFLOW, None),
    "a number that is 0 divides": (lambda x: (x / 0.0).sum(), 1e20, Cause.ZERO_DENOMINATOR, None),
}


@pytest.mark.parametrize("what", POWERS)
def test_of_a_power_the_number_that_is_to_blame_is_told(what: str) -> None:
    """Wherever base and exponent stand, in the call or in a tensor: 0 divides, an exponent overflows, a huge base does."""
    loss, number, cause, fix = POWERS[what]
    x = torch.full((2, 3), 2.0)
    x[0, 1] = number
    incident = diagnose(record(loss, x.requires_grad_()).snapshot(), "a.safetensors")
    assert incident.cause is cause, incident.sentence
    assert len(incident.origin.operands) == (1 if "exp2" in what else 2)
    assert fix is None or fix in [one.id for one in incident.fixes if one.proven], incident.fixes


def test_a_replay_that_was_run_is_not_run_again() -> None:
    """What is handed over is believed."""
    snapshot = overflowing()
    _, replayed, _ = examine(snapshot)
    told = replace(replayed, rows=replayed.rows[:1])
    assert [row for row in diagnose(snapshot, replayed=told).rows if row.kind != TEST] == list(told.rows)
    assert examine(snapshot, told)[1] is told


def test_an_origin_outside_the_program_is_told_as_it_was_seen() -> None:
    """The fixes are those that were tried in the process, and no picture is drawn of what the file does not hold."""
    made = observe_made("_softmax", torch.tensor([[0.5, NAN]]), 1, None, "layers.1", Phase.FORWARD)
    snapshot = replace(overflowing(), observation=replace(made, tried=TRIED))
    incident = diagnose(snapshot)
    told = tuple(replace(row, note=incident.reproduction.words) if row.kind == "recorded" else row for row in TRIED)
    assert (incident.origin, incident.cause, incident.rows) == (made.origin, Cause.FULLY_MASKED_SOFTMAX, told)
    assert [fix.id for fix in incident.fixes] == ["upcast_fp32"] and incident.picture is None
    assert diagnose(replace(snapshot, observation=made)).rows[0].id == "as_recorded", "nothing was tried there: what the file gives"


def test_of_a_program_that_runs_well_the_observation_is_told() -> None:
    """The fault was transient: what was seen counts, and the rows are those of the file."""
    healthy = record(masked_loss, leaf(2, 3)).snapshot(reached=Reached(NAN, 1, 1))
    incident = diagnose(healthy)
    assert (incident.origin.op, incident.phase, incident.cause, incident.picture) == ("unknown", "forward", Cause.UNKNOWN, None)
    assert [row.id for row in incident.rows] == ["as_recorded"]


@pytest.mark.parametrize(("loss", "phase"), [(NAN, "forward"), (INF, "forward"), (0.5, "backward"), (None, "backward")])
def test_of_what_nobody_saw_the_loss_tells_the_phase(loss: float | None, phase: str) -> None:
    """A finite loss leaves backward; what was seen is not overruled."""
    assert diagnose(outside(Observation(), reached=Reached(loss, 3, 3))).phase == phase
    assert diagnose(outside(POISONED, reached=Reached(loss, 3, 3))).phase == "weights"


def test_what_only_the_process_saw_joins_what_the_program_shows() -> None:
    """The kind of a step, its scale, and whether the loss counts an element."""
    spiked = replace(overflowing(), observation=Observation(Kind.SPIKE, scale="9 times the largest loss", masked=False))
    seen_, _, _ = examine(spiked)
    assert (seen_.kind, seen_.scale, seen_.origin.masked, seen_.origin.variable) == (Kind.SPIKE, "9 times the largest loss", False, "ratio")
    incident = diagnose(spiked)
    assert incident.suspect and "the step is 9 times the largest loss" in incident.sentence and incident.origin.masked is False


def test_a_file_whose_program_cannot_be_replayed_is_an_incident_with_a_note() -> None:
    """What was seen is told, and why there are no fixes."""
    whole = overflowing(notes=(("logged_loss", "the log shows 0"),))
    broken = replace(whole, tensors={}, observation=POISONED)
    _, replayed, problem = examine(broken)
    assert (replayed.rows, replayed.reproduces) == ((), None) and "is missing" in problem
    incident = diagnose(broken)
    assert [note.slug for note in incident.notes] == ["logged_loss", "not_replayed"] and incident.notes[1].text == problem
    assert all(note.step == 7 for note in incident.notes)
    assert (incident.cause, incident.origin.variable, incident.rows) == (Cause.POISONED_WEIGHTS, "lm_head.weight", ())
    assert examine(whole)[2] == "" and [note.slug for note in diagnose(whole).notes] == ["logged_loss"]


def test_a_later_step_knows_which_update_poisoned_the_weights() -> None:
    """The first whose update left non-finite weights, in the order of the steps and not of the files."""
    run = [
        outside(POISONED, step=9, reached=Reached(NAN, 3, 3, 3, 3)),
        outside(POISONED, step=5, reached=Reached(NAN, 3, 3, 3, 0)),
        outside(POISONED, step=7, reached=Reached(NAN, 3, 3, 3, 2)),
    ]
    found = verdict(run, ["nine", "five", "seven"])
    assert [(incident.step, incident.snapshot) for incident in found.incidents] == [(5, "five"), (7, "seven"), (9, "nine")]
    told = ["wrote it there" in incident.sentence for incident in found.incidents]
    assert told == [False, False, True] and "the update of step 7 wrote it there" in found.incidents[2].sentence
    (alone,) = verdict(run[:1]).incidents
    assert "before the step" in alone.sentence and alone.snapshot is None


def test_of_one_step_the_rank_that_made_the_harm_comes_first_and_is_named() -> None:
    """Where it only arrived, the sentence of the other rank is part of its own."""
    run = [outside(ARRIVED, rank=0), overflowing(rank=1), outside(ARRIVED, rank=2), outside(ARRIVED, rank=0, step=8)]
    found = verdict(run, ["zero", None])
    assert [(i.step, i.rank, i.cause) for i in found.incidents] == [
        (7, 1, Cause.INF_TIMES_ZERO_MASK),
        (7, 0, Cause.ALLREDUCE_NAN),
        (7, 2, Cause.ALLREDUCE_NAN),
        (8, 0, Cause.ALLREDUCE_NAN),
    ]
    source, first, second, later = (incident.sentence for incident in found.incidents)
    assert f"rank 1: {source}" in first and f"rank 1: {source}" in second and "all-reduce. A NaN" in later
    assert [incident.snapshot for incident in found.incidents] == [None, "zero", None, None]


def test_a_rank_is_no_source_of_its_own() -> None:
    """Two backward passes of one step on one rank."""
    _, other = verdict([overflowing(), outside(ARRIVED)]).incidents
    assert other.cause is Cause.ALLREDUCE_NAN and "rank 0" not in other.sentence


def test_a_verdict_counts_steps_and_says_everything_once() -> None:
    """Bad steps are at least those that were saved; a note of the run and of an incident is one note."""
    same = Note("logged_loss", "the log shows 0", 7)
    run = [overflowing(notes=((same.slug, same.text),)), overflowing(part=2, notes=(("other", "x"),)), overflowing(step=8)]
    found = verdict(run, notes=[same, Note("absorbed", "y", 1)], steps=9, skipped=2, bad_steps=1)
    assert (found.steps, found.skipped, found.bad_steps, found.status) == (9, 2, 2, "non-finite")
    assert found.notes == (same, Note("absorbed", "y", 1), Note("other", "x", 7))
    assert verdict(run, bad_steps=6).bad_steps == 6
    empty = verdict([])
    assert (empty.status, empty.steps, empty.skipped, empty.bad_steps) == (Status.UNWATCHED, 0, 0, 0) and empty.version


def test_a_framework_is_recognised_by_its_files_or_by_the_objective() -> None:
    """And what helps there is told in its own words."""
    snapshot = overflowing()
    assert (diagnose(snapshot).framework, diagnose(snapshot).remedies) == (None, ())
    site = "trl/trainer/grpo_trainer.py"
    incident = diagnose(replace(snapshot, objective={"key": "trl.grpo", "site": site, "settings": {}}))
    assert incident.framework is not None and incident.framework.lower() == "trl"
    sites = tuple(replace(known, file=f"/lib/{site}") for known in snapshot.program.sites)
    assert diagnose(replace(snapshot, program=replace(snapshot.program, sites=sites))).framework == incident.framework


HEADLINES = {
    "everything is bad": (Reached(NAN, 3, 2, 3, 1, "taken"), "loss NaN · 2 of 3 weight gradients and 1 of 3 weights non-finite · optimizer stepped"),
    "the loss is finite": (Reached(0.25, 3, 3, 3, 0, "skipped"), "loss 0.25 (finite) · 3 of 3 weight gradients non-finite · weights clean · optimizer step skipped"),
    "stopped": (Reached(INF, 3, 0, stepped="stopped"), "loss +inf · weight gradients clean · run stopped before the optimizer step"),
    "no optimizer": (Reached(NAN, 3, 3), "loss NaN · 3 of 3 weight gradients non-finite"),
    "no gradients": (Reached(NAN, 0, 0), "loss NaN"),
    "nobody counted": (Reached(NAN, 3, None), "loss NaN"),
    "no loss": (Reached(None, 3, 3, stepped="taken"), "3 of 3 weight gradients non-finite · optimizer stepped"),
    "nothing": (Reached(), ""),
    "another release's word": (Reached(NAN, stepped="postponed"), "loss NaN"),
}  # fmt: skip


@pytest.mark.parametrize("name", HEADLINES)
def test_the_headline_says_how_far_it_got(name: str) -> None:
    """Step, rank and phase, then figures; nothing of what nobody looked at."""
    reached, expected = HEADLINES[name]
    assert diagnose(outside(POISONED, rank=2, reached=reached)).headline == f"step 7 · rank 2 · weights   {expected}"


@pytest.mark.parametrize(("loss", "bad"), [(NAN, True), (INF, True), (0.5, False), (None, False)])
def test_what_was_reached_says_whether_the_loss_was(loss: float | None, bad: bool) -> None:
    """A loss that nobody knows is not a bad one."""
    incident = diagnose(outside(seen("module", NAN, outside=True), reached=Reached(loss, 3, 1, 4, 2, "taken")))
    assert incident.reached == {"loss": bad, "gradients": [1, 3], "weights": [2, 4], "stepped": "taken"}


def test_an_infinite_number_of_the_code_overflows_nothing(tmp_path: Path) -> None:
    """A coefficient that was set to infinity: it is named, and nothing is said of huge values."""
    model = nn.Linear(2, 1)
    with nanscope.watch(out=tmp_path) as scope:
        (model(torch.ones(1, 2)).abs() * math.inf).sum().backward()
    (incident,) = scope.verdict.incidents
    assert incident.cause is Cause.BAD_INPUT and "gave +inf" in incident.sentence and ", +inf) = +inf" in incident.sentence
    assert "A number that the code gave is infinite" in incident.sentence and incident.fixes[0].id == "validate_config"


def steps_of(critic: nn.Module, loss: Callable[[int], Tensor], out: Path) -> nanscope.Scope:
    optimizer = torch.optim.SGD(critic.parameters(), 0.1)
    with nanscope.watch(out=out) as scope:
        for step in range(1, 5):
            optimizer.zero_grad()
            loss(step).backward()
            optimizer.step()
    return scope


def test_a_variance_below_zero_that_a_model_came_with_is_told(tmp_path: Path) -> None:
    """A target network that a checkpoint has left with one: its weights are finite, and so is what it is given."""
    critic, target = (nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 1)) for _ in range(2))
    target.eval()

    def loss(step: int) -> Tensor:
        if step == 3:
            target[0].running_var[2] = -0.5
        with torch.no_grad():
            wanted = target(torch.randn(8, 4))
        return (critic(torch.randn(8, 4)) - wanted).square().mean()

    first = steps_of(critic, loss, tmp_path).verdict.incidents[0]
    assert (first.step, first.cause, first.origin.operands) == (3, Cause.SQRT_NEGATIVE, (("running_var", -0.5),))
    assert "running_var −0.5" in first.sentence and first.origin.index == (0, 2)


def test_of_what_a_number_is_divided_by_the_denominator_is_named(tmp_path: Path) -> None:
    """`c / x` with a number c is the reciprocal of x to torch: that is 0, and c is not."""
    linear, c = nn.Linear(3, 1), 1.0

    def loss(step: int) -> Tensor:
        x = torch.randn(4, 3)
        x[1] *= step < 3
        scale = c / x.norm(dim=1)
        return (linear(x) * (x * scale[:, None])).mean()

    first = steps_of(linear, loss, tmp_path).verdict.incidents[0]
    assert first.origin.operands == (("x.norm(dim=1)", 0.0),)


def test_a_number_that_the_code_writes_out_was_made_by_no_metric(tmp_path: Path) -> None:
    """Of an earlier step, which was NaN as well when it went to the host, and read by nobody."""
    linear = nn.Linear(3, 1)

    def loss(step: int) -> Tensor:
        advantages = torch.tensor([1.0, -1.0])
        if step == 3:
            advantages = advantages * float("nan")
        result: Tensor = (advantages * linear(torch.randn(2, 3)).squeeze(-1)).mean()
        (advantages.mean() / torch.zeros(())).item()
        return result

    first = steps_of(linear, loss, tmp_path).verdict.incidents[0]
    assert first.origin.variable == "advantages" and first.cause is Cause.BAD_INPUT


def test_what_is_put_into_a_view_is_called_what_the_view_is(tmp_path: Path) -> None:
    """Which torch writes to as the memory that it is a view of."""
    policy = nn.Linear(3, 5)

    def loss(step: int) -> Tensor:
        states, actions = torch.randn(4, 2, 3), torch.randint(5, (4, 2, 1))
        log_probs = torch.log_softmax(policy(states), -1).gather(-1, actions).squeeze(-1)
        with torch.no_grad():
            behaviour = torch.log_softmax(policy(states), -1).gather(-1, actions).squeeze(-1)
        if step == 3:
            behaviour[2, 1] = -math.inf
        return -torch.minimum(torch.exp(log_probs - behaviour) * torch.zeros(4, 1), log_probs).mean()

    first = steps_of(policy, loss, tmp_path).verdict.incidents[0]
    assert (first.step, first.origin.variable, first.origin.index) == (3, "behaviour", (2, 1))
    assert "behaviour was set to −inf" in first.sentence
