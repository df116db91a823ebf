"""Stable-Baselines3: `python stable_baselines3_trainer.py OUT NAME…`."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from stable_baselines3 import A2C, DQN, PPO, SAC
from telling import STEPS
from trained import Activation, Build, Plant, Ready, main

ROLLOUT = 8  # steps of the environment


class World(gymnasium.Env):  # type: ignore[type-arg]
    """An environment without a meaning; one of its rewards is the fault of the input. spoilt: which one."""

    observation_space = gymnasium.spaces.Box(-1, 1, (3,), np.float32)

    def __init__(self, plant: Plant, continuous: bool, spoilt: int) -> None:
        self.action_space = gymnasium.spaces.Box(-1, 1, (1,), np.float32) if continuous else gymnasium.spaces.Discrete(2)
        self._plant, self._rng, self._count, self._spoilt = plant, np.random.default_rng(1), 0, spoilt

    def reset(self, **given: Any) -> tuple[Any, dict[str, Any]]:  # type: ignore[override]
        return self._see(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self._count += 1
        bad = self._plant.clock.fault == "input" and self._count == self._spoilt
        return self._see(), math.inf if bad else float(self._rng.normal()), False, self._count % 5 == 0, {}

    def _see(self) -> Any:
        return self._rng.uniform(-1, 1, 3).astype(np.float32)


def on_policy(plant: Plant, out: Path, algorithm: Any = PPO, **settings: Any) -> Ready:
    """Each rollout is one step: all of it is learnt from at once."""
    world = World(plant, False, ROLLOUT + 3)
    model = algorithm("MlpPolicy", world, n_steps=ROLLOUT, seed=0, device="cpu", policy_kwargs=_small(plant), **settings)
    plant.poison("weights", model.policy.mlp_extractor.policy_net[0].weight)
    return Ready(lambda: model.learn(ROLLOUT * STEPS), (model.policy,))


def off_policy(plant: Plant, out: Path, algorithm: Any = SAC, **settings: Any) -> Ready:
    """A step after each step of the environment, once there are eight."""
    world = World(plant, algorithm is SAC, 6)
    model = algorithm(
        "MlpPolicy",
        world,
        learning_starts=ROLLOUT,
        batch_size=32,
        train_freq=1,
        seed=0,
        device="cpu",
        policy_kwargs=_small(plant),
        **settings,
    )
    first = model.critic.q_networks[0][0] if algorithm is SAC else model.q_net.q_net[0]
    plant.poison("weights", first.weight)
    if algorithm is SAC:
        plant.counts = lambda optimizer: optimizer is model.actor.optimizer  # the last one of each step
    return Ready(lambda: model.learn(ROLLOUT + STEPS), (model.policy,))


def _small(plant: Plant) -> dict[str, Any]:
    return {"net_arch": [8], "activation_fn": partial(Activation, plant)}


BUILDS: dict[str, Build] = {
    "SB3 PPO": partial(on_policy, batch_size=ROLLOUT, n_epochs=1),
    "SB3 A2C": partial(on_policy, algorithm=A2C),
    "SB3 SAC": off_policy,
    "SB3 DQN": partial(off_policy, algorithm=DQN, target_update_interval=1000),
}

if __name__ == "__main__":
    main(BUILDS, "stable_baselines3", "")
