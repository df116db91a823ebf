"""TRL: `_compute_loss` of GRPOTrainer, GMPOTrainer and RLOOTrainer, on a trainer that was made without its model.

Notable: the trainer is an object of TRL's class whose constructor did not run. It holds the config's own defaults and the few attributes
that the constructor derives from them; the model's forward answers with the batch's log-probs. The ratio against vLLM is the one step
that TRL takes elsewhere, inside its generation (grpo_trainer.py:2650-2704): `rollout_ratio` takes it here.
"""

from __future__ import annotations

import importlib
import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import MISSING, fields
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from nanscope.frameworks.rows import Setting
from nanscope.native.adapter import Adapter, old_log_probs, only, per_row, present
from nanscope.objective.settings import LossInputs

# where the loss type lives: module, trainer, config; every other type is one of GRPO's
_GRPO = ("trl.trainer.grpo_trainer", "GRPOTrainer", "GRPOConfig")
_HOME = {
    "gmpo": ("trl.experimental.gmpo.gmpo_trainer", "GMPOTrainer", "GMPOConfig"),
    "rloo": ("trl.trainer.rloo_trainer", "RLOOTrainer", "RLOOConfig"),
}
_COUNTS = ("num_items_in_batch", "num_processes")  # what the trainer counts: in the batch and in the accelerator, not in the config


def load() -> tuple[ModuleType, ...]:
    """Import the three trainers."""
    return tuple(importlib.import_module(module) for module, _, _ in (_GRPO, *_HOME.values()))


def call(kind: str, inputs: LossInputs, settings: Mapping[str, Setting]) -> Tensor:
    """Return `_compute_loss` of the trainer that has this loss type, in train mode."""
    module_name, trainer_name, config_name = _HOME.get(kind, _GRPO)
    module = importlib.import_module(module_name)
    trainer_class = getattr(module, trainer_name)
    own = {} if kind in _HOME else {"loss_type": kind}
    args = _args(getattr(module, config_name), {**settings, **own})
    trainer = _trainer(trainer_class, args, inputs, settings)
    loss: Tensor = trainer._compute_loss(trainer.model, _batch(kind, inputs, args, settings))
    return loss


def _args(config: Any, settings: Mapping[str, Setting]) -> SimpleNamespace:
    """Return the options of a config class with its own defaults; its __post_init__, which looks for devices, does not run."""
    defaults = {option.name: option.default for option in fields(config) if option.default is not MISSING}
    args = SimpleNamespace(**defaults | only({name: value for name, value in settings.items() if name not in _COUNTS}, defaults))
    if getattr(args, "steps_per_generation", None) is None:
        args.steps_per_generation = args.gradient_accumulation_steps  # as __post_init__ does
    return args


def _trainer(trainer_class: Any, args: SimpleNamespace, inputs: LossInputs, settings: Mapping[str, Setting]) -> Any:
    entropy = torch.zeros_like(inputs.log_probs).detach() if inputs.entropy is None else inputs.entropy
    taken = ("beta", "max_completion_length", "use_vllm", "top_entropy_quantile", "entropy_coef", "use_adaptive_entropy", "loss_type")
    trainer = object.__new__(trainer_class)
    for name, value in vars(args).items():
        if name in taken or name.startswith(("importance_sampling", "off_policy", "vllm_importance")):
            setattr(trainer, name, value)
    trainer.args = args
    trainer.model = SimpleNamespace(training=True)
    trainer.epsilon_low = args.epsilon
    trainer.epsilon_high = args.epsilon if args.epsilon_high is None else args.epsilon_high
    trainer.aux_loss_enabled = False
    trainer._entropy_bonus_enabled = getattr(args, "entropy_coef", 0.0) != 0.0
    trainer.current_gradient_accumulation_steps = args.gradient_accumulation_steps
    trainer.accelerator = SimpleNamespace(
        num_processes=settings.get("num_processes", 1),
        gather=lambda x: x,
        reduce=lambda x, reduction=None: x,
        sync_gradients=True,
    )
    trainer._metrics = {"train": defaultdict(list)}
    trainer._get_per_token_logps_and_entropies = lambda *ignored, **also: (inputs.log_probs, entropy, None)
    return trainer


def _batch(kind: str, inputs: LossInputs, args: SimpleNamespace, settings: Mapping[str, Setting]) -> dict[str, Tensor | None]:
    """Return what the trainer's generation step hands over. Masked positions are tokens that the model saw, with tool_mask 0."""
    mask = inputs.mask.long()
    count = settings.get("num_items_in_batch")
    batch: dict[str, Tensor | None] = {
        "prompt_ids": mask[:, :1],
        "prompt_mask": mask[:, :1],
        "completion_ids": mask,
        "completion_mask": torch.ones_like(mask),
        "tool_mask": mask,
        "advantages": per_row(inputs.advantages) if kind in _HOME else inputs.advantages.detach(),
        "old_per_token_logps": None if inputs.old_log_probs is None else inputs.old_log_probs.detach(),
        "num_items_in_batch": mask.sum() if count is None else torch.tensor(count),
    }
    if kind == "rloo":  # knows no tool_mask, and sums the row when it generates (rloo_trainer.py:1610)
        batch |= {"completion_mask": mask, "old_logps": (old_log_probs(inputs) * mask).sum(1)}
    if args.beta != 0.0 and kind != "rloo":
        batch["ref_per_token_logps"] = present(inputs.ref_log_probs, "ref_log_probs")
    if args.use_vllm and args.vllm_importance_sampling_correction:
        batch["sampling_per_token_logps"] = present(inputs.rollout_log_probs, "rollout_log_probs")
        batch["importance_sampling_ratio"] = rollout_ratio(inputs, args)
    return batch


def rollout_ratio(inputs: LossInputs, args: Any) -> Tensor:
    """Return the weight against vLLM's log-probs as TRL's generation step computes it, [B, T] or [B, 1].

    args: has vllm_importance_sampling_mode, _clip_min and _clip_max. A NaN difference is a token that vLLM did not score: weight 1.
    """
    difference = torch.nan_to_num(
        (old_log_probs(inputs) - present(inputs.rollout_log_probs, "rollout_log_probs")) * inputs.mask.long(), nan=0.0
    )
    if args.vllm_importance_sampling_mode.startswith("sequence"):
        difference = difference.sum(-1, keepdim=True)
    ratio = difference.exp()
    low, high = args.vllm_importance_sampling_clip_min, args.vllm_importance_sampling_clip_max
    if args.vllm_importance_sampling_mode.endswith("truncate"):
        return ratio if low is None and high is None else ratio.clamp(low, high)
    outside = (ratio < (-math.inf if low is None else low)) | (ratio > (math.inf if high is None else high))
    return ratio.masked_fill(outside, 0.0)


ADAPTER = Adapter("trl", load, call)
