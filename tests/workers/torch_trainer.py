"""Loops of plain torch, as single-file implementations write them: `python torch_trainer.py OUT NAME…`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from telling import STEPS
from torch import Tensor, nn
from trained import Activation, Net, Plant, Ready, batches, main


class Agent(nn.Module):
    """Actor and critic of four numbers and two actions."""

    def __init__(self, plant: Plant) -> None:
        super().__init__()
        self.critic = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
        self.actor = nn.Sequential(nn.Linear(4, 8), Activation(plant), nn.Linear(8, 2))

    def get_action_and_value(self, x: Tensor, action: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        probs = torch.distributions.Categorical(logits=self.actor(x), validate_args=False)
        return probs.log_prob(action), probs.entropy(), self.critic(x)


def cleanrl(plant: Plant, out: Path) -> Ready:
    """PPO in one file: a rollout, minibatches of it, a clipped loss for policy and value."""
    agent = Agent(plant)
    plant.poison("weights", agent.actor[0].weight)
    optimizer = torch.optim.Adam(agent.parameters(), lr=2.5e-4, eps=1e-5)
    generator = torch.Generator().manual_seed(1)
    b_obs, b_actions = torch.randn(24, 4, generator=generator), torch.randint(2, (24,), generator=generator)
    b_returns, b_values, b_advantages = torch.randn(3, 24, generator=generator)
    b_advantages[10] = 1.0
    with torch.no_grad():
        b_logprobs = agent.get_action_and_value(b_obs, b_actions)[0]

    def train() -> None:
        clip_coef, ent_coef, vf_coef, max_grad_norm = 0.2, 0.01, 0.5, 0.5
        for start in range(0, 24, 8):
            mb_inds = plant.spoilt(slice(start, start + 8), lambda _: b_logprobs.__setitem__(10, -200.0))
            newlogprob, entropy, newvalue = agent.get_action_and_value(b_obs[mb_inds], b_actions[mb_inds])
            logratio = newlogprob - b_logprobs[mb_inds]
            ratio = logratio.exp()
            with torch.no_grad():
                approx_kl = ((ratio - 1) - logratio).mean()
            mb_advantages = b_advantages[mb_inds]
            mb_advantages = (mb_advantages - mb_advantages.mean()) / (mb_advantages.std() + 1e-8)
            pg_loss1 = -mb_advantages * ratio
            pg_loss2 = -mb_advantages * torch.clamp(ratio, 1 - clip_coef, 1 + clip_coef)
            pg_loss = torch.max(pg_loss1, pg_loss2).mean()
            newvalue = newvalue.view(-1)
            v_loss_unclipped = (newvalue - b_returns[mb_inds]) ** 2
            v_clipped = b_values[mb_inds] + torch.clamp(newvalue - b_values[mb_inds], -clip_coef, clip_coef)
            v_loss_clipped = (v_clipped - b_returns[mb_inds]) ** 2
            v_loss = 0.5 * torch.max(v_loss_unclipped, v_loss_clipped).mean()
            loss = pg_loss - ent_coef * entropy.mean() + v_loss * vf_coef
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(agent.parameters(), max_grad_norm)
            optimizer.step()
            float(approx_kl)

    return Ready(train, (agent,), (agent,))


def loop(plant: Plant, compiled: Callable[[Net], Callable[[Tensor, Tensor], Tensor]]) -> Ready:
    model = Net(plant)
    plant.poison("weights", model.first.weight)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    step = compiled(model)

    def train() -> None:
        for x, y in batches(plant, STEPS):
            loss = step(x, y)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()

    return Ready(train, (model,), (model,))


def compiled_model(plant: Plant, out: Path) -> Ready:
    """A model that is compiled, a loss that is not."""

    def compiled(model: Net) -> Callable[[Tensor, Tensor], Tensor]:
        forward = torch.compile(model, backend="aot_eager")
        return lambda x, y: (forward(x) - y).square().mean()

    return loop(plant, compiled)


def compiled_loss(plant: Plant, out: Path) -> Ready:
    """Model and loss in one graph."""

    def compiled(model: Net) -> Callable[[Tensor, Tensor], Tensor]:
        def loss(x: Tensor, y: Tensor) -> Tensor:
            error = model(x) - y
            return error.square().mean()

        return torch.compile(loss, backend="aot_eager")

    return loop(plant, compiled)


BUILDS = {"single-file PPO": cleanrl, "torch.compile, the model": compiled_model, "torch.compile, the step": compiled_loss}

if __name__ == "__main__":
    main(BUILDS, "torch", "")
