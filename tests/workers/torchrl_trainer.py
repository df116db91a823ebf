"""Losses of torchrl, in loops as its documentation writes them: `python torchrl_trainer.py OUT NAME…`."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from telling import STEPS
from tensordict import TensorDict
from tensordict.nn import InteractionType, NormalParamExtractor, TensorDictModule
from torch import nn
from torchrl.data import LazyTensorStorage, ReplayBuffer, SamplerWithoutReplacement
from torchrl.modules import ProbabilisticActor, QValueActor, TanhNormal, ValueOperator
from torchrl.objectives import ClipPPOLoss, DQNLoss, SACLoss, SoftUpdate
from torchrl.objectives.value import GAE
from trained import Activation, Build, Plant, Ready, main

ROWS = 16


def net(plant: Plant, inputs: int, outputs: int) -> nn.Module:
    return nn.Sequential(nn.Linear(inputs, 8), Activation(plant), nn.Linear(8, outputs))


def rows(actions: torch.Tensor) -> TensorDict:
    """What a collector hands over."""
    generator = torch.Generator().manual_seed(1)
    observation = torch.randn(ROWS, 3, generator=generator)
    done = torch.zeros(ROWS, 1, dtype=torch.bool)
    following = {
        "observation": torch.randn(ROWS, 3, generator=generator),
        "reward": torch.randn(ROWS, 1, generator=generator),
        "done": done,
        "terminated": done,
    }
    return TensorDict({"observation": observation, "action": actions, "next": following}, [ROWS])


def actor_of(plant: Plant, **names: Any) -> Any:
    module = TensorDictModule(nn.Sequential(net(plant, 3, 2), NormalParamExtractor()), in_keys=["observation"], out_keys=["loc", "scale"])
    return ProbabilisticActor(
        module,
        in_keys=["loc", "scale"],
        distribution_class=TanhNormal,
        return_log_prob=True,
        default_interaction_type=InteractionType.RANDOM,
        **names,
    )


def clip_ppo(plant: Plant, out: Path) -> Ready:
    """Epochs over one batch; the fault of the input is an old log-prob."""
    actor, critic = actor_of(plant), ValueOperator(nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1)), in_keys=["observation"])
    loss_module = ClipPPOLoss(actor, critic, entropy_coeff=0.01)
    optimizer = torch.optim.Adam(loss_module.parameters(), 3e-4)
    with torch.no_grad():
        batch = actor(rows(torch.zeros(ROWS, 1)))
        GAE(gamma=0.99, lmbda=0.95, value_network=critic)(batch)
    plant.poison("weights", actor[0].module[0][0].weight)
    name = next(str(key) for key in list(batch.keys()) if "log_prob" in str(key))
    plant.between["input"] = lambda: batch[name].__setitem__(3, -200.0)

    def train() -> None:
        for _ in range(STEPS):
            loss_vals = loss_module(batch)
            loss_value = loss_vals["loss_objective"] + loss_vals["loss_critic"] + loss_vals["loss_entropy"]
            loss_value.backward()
            nn.utils.clip_grad_norm_(loss_module.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()

    return Ready(train, (loss_module,))


def replayed(plant: Plant, content: TensorDict) -> ReplayBuffer:
    """A buffer whose rewards are the fault of the input."""
    buffer = ReplayBuffer(storage=LazyTensorStorage(ROWS), sampler=SamplerWithoutReplacement(shuffle=False), batch_size=ROWS)
    buffer.extend(content)
    plant.between["input"] = lambda: buffer[:].get(("next", "reward")).__setitem__(3, math.inf)
    return buffer


def dqn(plant: Plant, out: Path) -> Ready:
    actor = QValueActor(net(plant, 3, 2), in_keys=["observation"], action_space="categorical")
    loss_module = DQNLoss(actor, action_space="categorical", delay_value=True)
    loss_module.make_value_estimator(gamma=0.9)
    updater, optimizer = SoftUpdate(loss_module, eps=0.99), torch.optim.Adam(loss_module.parameters(), 1e-3)
    buffer = replayed(plant, rows(torch.randint(2, (ROWS,), generator=torch.Generator().manual_seed(2))))
    plant.poison("weights", actor[0].module[0].weight)

    def train() -> None:
        for _ in range(STEPS):
            loss = loss_module(buffer.sample())["loss"]
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            updater.step()

    return Ready(train, (loss_module,))


class Critic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, observation: torch.Tensor, action: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.net(torch.cat([observation, action], -1))
        return found


def sac(plant: Plant, out: Path) -> Ready:
    """Three losses with an optimizer each."""
    actor, critic = actor_of(plant), ValueOperator(Critic(), in_keys=["observation", "action"])
    loss_module = SACLoss(actor, critic, num_qvalue_nets=2, action_spec=None, target_entropy=-1.0)
    loss_module.make_value_estimator(gamma=0.9)
    updater = SoftUpdate(loss_module, eps=0.99)
    parts = {"loss_actor": loss_module.actor_network_params, "loss_qvalue": loss_module.qvalue_network_params}
    optimizers = {name: torch.optim.Adam(list(part.flatten_keys().values()), 1e-3) for name, part in parts.items()}
    buffer = replayed(plant, rows(torch.rand(ROWS, 1, generator=torch.Generator().manual_seed(2)) - 0.5))
    plant.poison("weights", next(p for p in optimizers["loss_actor"].param_groups[0]["params"] if p.dim() == 2))
    plant.counts = lambda optimizer: optimizer is optimizers["loss_qvalue"]

    def train() -> None:
        for _ in range(STEPS):
            losses = loss_module(buffer.sample())
            for name in optimizers:
                losses[name].backward(retain_graph=name == "loss_actor")
            for optimizer in optimizers.values():
                optimizer.step()
                optimizer.zero_grad()
            updater.step()

    return Ready(train, (loss_module,))


BUILDS: dict[str, Build] = {"torchrl ClipPPOLoss": clip_ppo, "torchrl DQNLoss": dqn, "torchrl SACLoss": sac}

if __name__ == "__main__":
    main(BUILDS, "torchrl", "")
