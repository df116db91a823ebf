"""Trainers of others, as they are: SAC, PPO and DQN of Stable-Baselines3, and TRL's GRPO on a random Qwen2 that needs no network.

Notable: neither is imported before it is asked for, and both are trained by their own loop; a step here is what that loop makes between two
steps of its optimizer, the environment or the sampling included.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import warnings
from collections.abc import Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor, nn

GRPO_STEPS = 4  # of TRL, in one piece


class _Trainer:
    """What both have in common: everything is made anew for each round."""

    device = "cpu"
    folder: Path | None = None
    whole = False  # of an actor's step nothing is recorded that only a critic has
    steps = 0
    model: nn.Module

    def weights(self) -> Sequence[Tensor]:
        """Return a copy of the weights."""
        return [parameter.detach().clone() for parameter in self.model.parameters()]


class Agent(NamedTuple):
    """One of Stable-Baselines3, with its defaults but for `settings`. steps: of the environment, in one piece; updates: that they bring.
    starts: steps of the environment before the first piece. optimizers: where in the agent they are."""

    kind: str
    environment: str
    steps: int
    updates: int
    starts: int
    optimizers: tuple[str, ...]
    settings: dict[str, int]


AGENTS = {
    "sac": Agent(
        "SAC",
        "Pendulum-v1",
        steps=20,
        updates=20,
        starts=100,
        optimizers=("critic.optimizer", "actor.optimizer", "ent_coef_optimizer"),
        settings={"learning_starts": 100, "batch_size": 256},
    ),
    "ppo": Agent("PPO", "CartPole-v1", steps=256, updates=40, starts=0, optimizers=("policy.optimizer",), settings={"n_steps": 256}),
    "dqn": Agent(
        "DQN", "CartPole-v1", steps=80, updates=20, starts=100, optimizers=("policy.optimizer",), settings={"learning_starts": 100}
    ),
}


class StableBaselines(_Trainer):
    """An agent as it learns: of SAC each update is a step of three optimizers, for the critics, the actor and the temperature."""

    def __init__(self, agent: Agent) -> None:
        self._described = agent
        self._kind: Any = getattr(importlib.import_module("stable_baselines3"), agent.kind)
        self.restore()

    def restore(self) -> None:
        """A new agent, with a buffer that has been filled where it has one."""
        kind = self._described
        self._agent = self._kind("MlpPolicy", kind.environment, seed=0, device="cpu", **kind.settings)
        if kind.starts:
            self._agent.learn(kind.starts)
        self.model = self._agent.policy

    def step(self) -> None:
        """Some steps of the environment, with the updates that belong to them."""
        before = self._made()
        self._agent.learn(self._described.steps, reset_num_timesteps=False)
        self.steps += self._made() - before

    def _made(self) -> int:
        """How many steps its optimizers count themselves."""
        optimizers = [attrgetter(name)(self._agent) for name in self._described.optimizers]
        return sum(int(next(iter(optimizer.state.values()))["step"]) if optimizer.state else 0 for optimizer in optimizers)


class Trl(_Trainer):
    """TRL's GRPOTrainer on a random two-layer Qwen2 and a vocabulary of a few words; it samples, scores and trains as in a long run."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.restore()

    def restore(self) -> None:
        """A new trainer, the same each time."""
        with warnings.catch_warnings(action="ignore"):
            self._trainer = _grpo_trainer(self._folder)
        self.model = self._trainer.model

    def step(self) -> None:
        """Train so many steps."""
        with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings(action="ignore"):
            self._trainer.train()
        self.steps += self._trainer.state.global_step


WORDS = (
    "<pad>",
    "<bos>",
    "<eos>",
    "one",
    "two",
    "three",
    "four",
    "five",
    "six",
    "seven",
    "eight",
    "plus",
    "minus",
    "times",
    "is",
    "the",
    "sum",
    "of",
    "it",
)
PROMPTS = ("one plus two is", "the sum of three four is", "six minus five", "two times three is it")


def _grpo_trainer(folder: Path) -> Any:
    tokenizers, transformers, trl, datasets = map(importlib.import_module, ("tokenizers", "transformers", "trl", "datasets"))
    transformers.set_seed(7)
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="<pad>"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    marks = dict(zip(("pad_token", "bos_token", "eos_token"), WORDS, strict=False))
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<pad>", **marks)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
    ids = {f"{name}_id": getattr(tokenizer, f"{name}_id") for name in marks}
    model = transformers.Qwen2ForCausalLM(transformers.Qwen2Config(vocab_size=len(WORDS), max_position_embeddings=64, **sizes, **ids))
    config = trl.GRPOConfig(
        output_dir=str(folder),
        learning_rate=1e-4,
        seed=7,
        bf16=False,
        use_cpu=True,
        dataloader_pin_memory=False,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        max_steps=GRPO_STEPS,
        per_device_train_batch_size=8,
        num_generations=4,
        num_iterations=2,  # more than one, so that TRL keeps the old log-probs
        max_completion_length=16,
        beta=0.0,
    )
    dataset = datasets.Dataset.from_dict({"prompt": list(PROMPTS)})
    return trl.GRPOTrainer(model=model, reward_funcs=_mean_id, args=config, train_dataset=dataset, processing_class=tokenizer)


def _mean_id(completion_ids: Sequence[Sequence[int]], **_: Any) -> list[float]:
    """A reward that seldom ties within a group."""
    return [sum(ids) / len(ids) for ids in completion_ids]
