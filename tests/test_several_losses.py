"""Several losses of one module, and an optimizer for each: every one is looked into, and what follows from one is told so."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import nanscope
from nanscope.causes import Cause
from nanscope.snapshot.observation import Phase


class ActorCritic(nn.Module):
    """A module whose forward pass returns its losses, as those of torchrl do. shared: the second one goes through the first one's part."""

    def __init__(self, shared: bool) -> None:
        super().__init__()
        self.actor, self.critics, self.shared = nn.Linear(3, 3), nn.Parameter(torch.ones(2, 3)), shared

    def forward(self, x: Tensor, old: Tensor) -> dict[str, Tensor]:
        action = self.actor(x)
        ratio = torch.exp(action - old)
        # a critic of which only the content is wanted
        frozen = torch.func.vmap(lambda weight: (action * weight).sum(-1))(self.critics.detach())
        value = (action if self.shared else action.detach()) @ self.critics.t()
        return {"actor": -(ratio.mean() + frozen.mean()), "critic": (value - old[:, :2]).exp().mean(), "entropy": action.detach().mean()}


def train(tmp_path: Path, shared: bool, kept: bool, steps: list[Tensor], rate: float = 1e-3) -> nanscope.Scope:
    """Differentiate the two losses one by one, the actor's first. steps: old log-probs of each. rate: the critics', infinite in step 2."""
    torch.manual_seed(0)
    module = ActorCritic(shared)
    optimizers = {"actor": torch.optim.Adam(module.actor.parameters(), 1e-3), "critic": torch.optim.Adam([module.critics], 1e-3)}
    with nanscope.watch(out=tmp_path) as scope:
        for step, old in enumerate(steps, 1):
            losses = module(torch.randn(4, 3), old)
            losses["actor"].backward(retain_graph=kept)
            losses["critic"].backward()
            optimizers["critic"].param_groups[0]["lr"] = rate if step == 2 else 1e-3
            for optimizer in optimizers.values():
                optimizer.step()
                optimizer.zero_grad()
    return scope


FINE = torch.zeros(4, 3)


@pytest.mark.parametrize(("shared", "kept"), [(False, False), (False, True), (True, True)])
def test_the_second_loss_of_a_module_is_looked_into(tmp_path: Path, shared: bool, kept: bool) -> None:
    """Whether the graph of the first one is kept or is another one."""
    old = FINE.clone()
    old[2, 1] = -math.inf  # the actor's loss has it, too
    incidents = train(tmp_path, shared, kept, [FINE, old]).verdict.incidents
    found = [(one.step, one.micro_batch, one.phase, one.cause, one.origin.variable, one.origin.index) for one in incidents]
    assert found == [(2, part, Phase.INPUT, Cause.BAD_INPUT, "old", (2, 1)) for part in (1, 2)]


def test_what_follows_is_told_where_another_optimizer_has_good_weights(tmp_path: Path) -> None:
    """The actor's update leaves its weights finite after the critics' have gone bad: the next step follows from that all the same, and of
    the loss that reads the critics without a gradient a weight is what was bad."""
    incidents = train(tmp_path, False, False, [FINE, FINE, FINE], rate=math.inf).verdict.incidents
    assert [(one.step, one.micro_batch, one.phase, one.consequence_of) for one in incidents] == [
        (2, 2, Phase.OPTIMIZER, None), (3, 1, Phase.WEIGHTS, 2),
    ]  # fmt: skip
    assert incidents[1].origin.variable == "critics"
    assert "the update of step 2 wrote it there" in incidents[1].sentence


def test_what_waits_for_a_loss_that_nobody_differentiates_is_let_go_of(tmp_path: Path) -> None:
    """Logits that are still there when the loss has been differentiated keep the arguments of their call until they are gone."""
    model, critic = nn.Linear(64, 8), ActorCritic(False)
    optimizer = torch.optim.SGD([*model.parameters(), *critic.parameters()], 0.01)
    held = []
    with nanscope.watch(out=tmp_path) as scope:
        for _ in range(12):
            x = torch.randn(32, 64)
            logits = model(x)
            logits.exp().mean().backward()
            other = critic(torch.randn(4, 3), torch.zeros(4, 3))
            other["actor"].backward()
            optimizer.step()
            optimizer.zero_grad()
            held.append(scope._tape.held)
            del x
        assert other["critic"].requires_grad
    assert max(held[6:]) <= max(held[:6]), held


@pytest.mark.parametrize("bad_first", [True, False])
def test_weights_of_two_optimizers_go_bad_one_by_one(tmp_path: Path, bad_first: bool) -> None:
    """Whichever steps last: a step that both have taken is bad as long as one of them has bad weights."""
    models = [nn.Linear(2, 1, bias=False) for _ in range(2)]
    optimizers = [torch.optim.SGD(model.parameters(), 0.1) for model in models]
    with nanscope.watch(out=tmp_path) as scope:
        for step in range(3):
            x = torch.ones(1, 2)
            if step == 1:
                x[0, 0] = math.nan
            loss = models[not bad_first](x).sum() + models[bad_first](torch.ones(1, 2)).sum()
            loss.backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    assert [(one.step, one.consequence_of) for one in scope.verdict.incidents] == [(2, None), (3, 2)]


def test_the_weights_of_all_optimizers_of_a_step_are_counted(tmp_path: Path) -> None:
    """One loss, and an optimizer for each of its two models."""
    body, head = nn.Linear(2, 4), nn.Linear(4, 1)
    optimizers = [torch.optim.AdamW(body.parameters()), torch.optim.SGD(head.parameters(), 0.1)]
    with nanscope.watch(out=tmp_path) as scope:
        for step in range(3):
            mask = torch.ones(3, 1) * (step != 2)
            ((head(body(torch.ones(3, 2))) * mask).sum() / mask.sum()).backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    (incident,) = scope.verdict.incidents
    assert incident.reached["weights"] == [4, 4] and "wrote it into 4 weights" in scope.verdict.sentence


def test_weights_that_were_bad_before_the_step_were_not_spoilt_by_its_update(tmp_path: Path) -> None:
    """The update of the step that found them bad comes after it, in its second micro-batch as well."""
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with nanscope.watch(out=tmp_path) as scope:
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        with torch.no_grad():
            model.weight[0, 1] = math.nan
        for _ in range(2):
            model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    assert [(one.step, one.micro_batch) for one in scope.verdict.incidents] == [(2, 1), (2, 2)]
    assert not any("the update of step 2" in one.sentence for one in scope.verdict.incidents)


def test_a_weight_of_a_loss_whose_critic_was_trained_in_between_is_followed_to_where_it_was_made(tmp_path: Path) -> None:
    """A part of it, without gradient, goes into the actor's loss, which is differentiated when what the rest of it went into is over."""
    torch.manual_seed(0)
    actor, critic, states = nn.Linear(3, 1), nn.Linear(3, 1), torch.randn(6, 3)
    optimizers = [torch.optim.SGD(model.parameters(), 1e-3) for model in (critic, actor)]
    targets = torch.tensor([0.1, -0.2, 0.3, 0.0, 60.0, 0.2])[:, None]
    with nanscope.watch(out=tmp_path) as scope:
        for returns in (torch.zeros(6, 1), targets):
            values = critic(states)
            value_loss = (values - returns).square().mean()
            gain = torch.exp((returns - values) / 0.1)
            weights = gain[:, 0].detach()
            policy_loss = (actor(states)[:, 0] * weights).mean()
            for optimizer, loss in zip(optimizers, (value_loss, policy_loss), strict=True):
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
    found = [(one.step, one.cause, one.origin.op, one.origin.variable, one.origin.index) for one in scope.verdict.incidents[:1]]
    assert found == [(4, Cause.EXP_OVERFLOW, "exp", "gain", (4, 0))]
