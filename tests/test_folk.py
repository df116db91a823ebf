"""Settings that people advise to each other, tried on the recorded step: which would have helped, and which not."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from recorded import Recorded, record
from torch import Tensor

from nanscope.frameworks.losses import LOSSES
from nanscope.frameworks.rows import Tries
from nanscope.frameworks.table import FRAMEWORKS
from nanscope.replay.folk import folk_rows
from nanscope.report.tried import ADVISED, groups_of
from nanscope.snapshot.observation import Row
from nanscope.verdict.diagnose import diagnose

VERL = next(framework for framework in FRAMEWORKS if framework.name == "verl")
NAMES = [one.setting for one in VERL.folk]
MASK = torch.tensor([[1.0, 1.0, 1.0, 1.0], [1.0, 1.0, 0.0, 0.0]])


def masked_mean(values, mask):
    return (values * mask).sum() / mask.sum()


def ppo_loss(log_prob, old_log_prob, ref_log_prob, advantages, response_mask):
    ratio = torch.exp(log_prob - old_log_prob)
    pg_loss = masked_mean(torch.max(-advantages * ratio, -advantages * torch.clamp(ratio, 0.8, 1.2)), response_mask)
    kl = ref_log_prob - log_prob
    kld = torch.exp(kl) - kl - 1
    kl_loss = masked_mean(torch.clamp(kld, min=-10, max=10), response_mask)
    return pg_loss + kl_loss * 0.001


def batch(*, ref: float = 0.0, old: float = 0.0) -> list[Tensor]:
    """What that loss reads, with something added to the reference or taken off the old log-prob of a masked token."""
    log_prob = -0.1 - torch.rand(2, 4)
    ref_log_prob, old_log_prob = log_prob + 0.1, log_prob - 0.02
    ref_log_prob[1, 3] += ref
    old_log_prob[1, 3] -= old
    return [log_prob.requires_grad_(), old_log_prob, ref_log_prob, torch.tensor([[1.0], [-1.0]]), MASK]


def step(*, ref: float = 0.0, old: float = 0.0) -> Recorded:
    return record(ppo_loss, *batch(ref=ref, old=old))


def rows(recorded: Recorded, **changes: Any) -> dict[str, Row]:
    found = folk_rows(recorded.snapshot(**changes), VERL, recorded.trace)
    assert [row.label for row in found] == NAMES
    return {row.label: row for row in found}


def test_an_overflow_in_the_kl_term_is_helped_by_what_takes_it_out() -> None:
    """use_kl_loss=False and an estimator that clamps help; a smaller coefficient, also 0, and that of the KL in the reward do not."""
    found = rows(step(ref=200.0))
    works = {name: row.works for name, row in found.items()}
    assert works == dict(zip(NAMES, (True, False, False, True, False), strict=True))
    assert all(row.bad == 1 for row in found.values() if not row.works)
    assert "0 · NaN is NaN" in found["actor.kl_loss_coef=0"].note
    assert "KL in the reward" in found["algorithm.kl_ctrl.kl_coef=0"].note


def test_what_is_tried_is_the_recorded_program() -> None:
    """The loss without the KL term is that of the policy term alone, and with a tenth of the coefficient the KL counts a tenth."""
    given = batch()
    healthy = record(ppo_loss, *given)
    whole, policy = float(healthy.loss), float(record(ppo_loss_alone, *given).loss)
    found = rows(healthy)
    assert found["actor.use_kl_loss=False"].loss == pytest.approx(policy)
    assert found["a tenth of actor.kl_loss_coef"].loss == pytest.approx(policy + 0.1 * (whole - policy))
    assert found["actor.kl_loss_coef=0"].loss == pytest.approx(policy)
    assert found["algorithm.kl_ctrl.kl_coef=0"].loss == whole


def ppo_loss_alone(log_prob, old_log_prob, ref_log_prob, advantages, response_mask):
    ratio = torch.exp(log_prob - old_log_prob)
    return masked_mean(torch.max(-advantages * ratio, -advantages * torch.clamp(ratio, 0.8, 1.2)), response_mask)


def test_a_fault_of_the_policy_term_is_helped_by_none_of_them() -> None:
    """The ratio overflows: whatever is done to the KL, the gradient stays NaN."""
    found = rows(step(old=200.0))
    assert [row.works for row in found.values()] == [False] * len(NAMES)
    assert all(row.bad == 1 for row in found.values())


def test_what_is_so_already_is_not_tried() -> None:
    """A run that has use_kl_loss=False is not advised to set it."""
    settings = {"key": "verl.ppo_loss", "settings": {"use_kl_loss": False, "kl_loss_type": "low_var_kl"}}
    found = rows(step(old=200.0), objective=settings)
    for name in ("actor.use_kl_loss=False", "actor.kl_loss_type=low_var_kl"):
        assert found[name].loss is None and "already" in found[name].note


def weighed_by_a_tensor(log_prob, old_log_prob, ref_log_prob, advantages, response_mask, coefficient):
    ratio = torch.exp(log_prob - old_log_prob)
    pg_loss = masked_mean(torch.max(-advantages * ratio, -advantages * torch.clamp(ratio, 0.8, 1.2)), response_mask)
    return pg_loss + masked_mean((log_prob - ref_log_prob).square() / 2, response_mask) * coefficient


def test_where_the_program_shows_no_coefficient_the_objective_is_run() -> None:
    """A NaN in the reference at a masked token, with a loss that multiplies by the mask: under the recorded settings verl's loss fails as it
    did, without the KL it does not, and neither a coefficient nor another estimator mends it."""
    given = batch()
    given[2][1, 3] = math.nan
    recorded = record(weighed_by_a_tensor, *given, torch.tensor(0.001))
    own = {"use_kl_loss": True, "kl_loss_coef": 0.001, "kl_loss_type": "k2", "loss_agg_mode": "seq-mean-token-mean"}
    found = rows(recorded, objective={"key": "verl.ppo_loss", "settings": own})
    works = {name: (row.loss is not None, row.works) for name, row in found.items()}
    assert works == dict(zip(NAMES, ((True, True), (True, False), (True, False), (True, False), (True, False)), strict=True))
    unknown = rows(recorded)
    assert all(row.loss is None for name, row in unknown.items() if "kl_ctrl" not in name)


def test_other_frameworks_and_steps_that_cannot_be_run_have_none() -> None:
    """Nothing is advised where nobody advises it, or where nothing can be tried."""
    recorded = step(ref=200.0)
    other = next(framework for framework in FRAMEWORKS if not framework.folk)
    assert folk_rows(recorded.snapshot(), other, recorded.trace) == ()
    assert folk_rows(recorded.snapshot(), None, recorded.trace) == ()
    assert folk_rows(recorded.snapshot(), VERL, None) == ()


def test_they_stand_beside_the_fixes() -> None:
    """In the table of what was tried, under a heading of their own, for a step of that framework; no fix of the verdict is one of them."""
    recorded = step(ref=200.0)
    sites = tuple(replace(site, file="/site-packages/verl/workers/old.py") for site in recorded.program.sites)
    incident = diagnose(recorded.snapshot(program=replace(recorded.program, sites=sites)))
    (group,) = [group for group in groups_of(incident) if group.title == ADVISED]
    assert [row.label for row in group.rows] == NAMES
    assert group.rows[0].outcome == "✓ would have helped" and group.rows[2].outcome.startswith("✗ does not help: 0 still multiplies")
    assert not {fix.label for fix in incident.fixes} & set(NAMES)
    assert ADVISED not in {group.title for group in groups_of(diagnose(recorded.snapshot()))}


def test_the_options_are_those_of_the_loss() -> None:
    """Whatever is said to be read by a loss is one of its options, and its value is one that it takes; what is not read is none."""
    row = LOSSES["verl.ppo_loss"]
    for one in VERL.folk:
        assert (one.option in row.names()) is (one.does is not Tries.NOTHING)
        if one.does is Tries.CHOOSES:
            row.options(**{one.option: one.value}).settings()
