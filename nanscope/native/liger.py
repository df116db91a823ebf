"""Liger-Kernel: `LigerFusedLinearGRPOFunction.ppo_loss_fn`, the loss inside its fused linear layer, as it is called for one chunk.

Notable: the whole batch is one chunk here, and the mask stands for both of its masks. The fused layer calls the same function row by row.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from inspect import signature
from types import ModuleType
from typing import Any

from torch import Tensor

from nanscope.frameworks.losses import LOSSES
from nanscope.frameworks.rows import Setting
from nanscope.native.adapter import Adapter, old_log_probs, only, out_of_reach, per_row, present
from nanscope.native.trl import rollout_ratio
from nanscope.objective.settings import LossInputs

_RATIO = tuple(f"vllm_importance_sampling_{name}" for name in ("correction", "mode", "clip_min", "clip_max"))
_OTHERS = ("use_vllm", *_RATIO, "num_processes", "steps_per_generation")  # of whoever computes vllm_is_ratio, and of the trainer


def load() -> ModuleType:
    """Import the chunked loss."""
    return importlib.import_module("liger_kernel.chunked_loss.grpo_loss")


def call(kind: str, inputs: LossInputs, settings: Mapping[str, Setting]) -> Tensor:
    """Return the first of what `ppo_loss_fn` returns. max_completion_length is the width of the batch if left out, as for `dr_grpo`."""
    ppo_loss_fn = load().LigerFusedLinearGRPOFunction.ppo_loss_fn
    said = only({name: value for name, value in settings.items() if name not in _OTHERS}, signature(ppo_loss_fn).parameters)
    if settings.get("num_processes", 1) != 1 or settings.get("steps_per_generation") is not None:
        raise out_of_reach("num_processes or steps_per_generation", "Liger asks torch.distributed, and knows one step")
    if said.get("max_completion_length") is None:
        said["max_completion_length"] = inputs.log_probs.shape[1]
    loss: Tensor = ppo_loss_fn(
        inputs.log_probs,
        inputs.mask.long(),
        per_row(inputs.advantages),
        inputs.mask.long(),
        ref_per_token_logps=None if settings.get("beta") == 0.0 else present(inputs.ref_log_probs, "ref_log_probs"),
        old_per_token_logps=old_log_probs(inputs),
        loss_type=kind,
        vllm_is_ratio=_ratio(kind, inputs, settings),
        **said,
    )[0]
    return loss


def _ratio(kind: str, inputs: LossInputs, settings: Mapping[str, Setting]) -> Tensor | None:
    """Return the ratio that TRL would pass, None without vLLM."""
    row = LOSSES[f"liger.{kind}"]
    options: Any = row.options(**dict(row.fixed), **settings)
    return rollout_ratio(inputs, options) if options.use_vllm and options.vllm_importance_sampling_correction else None


ADAPTER = Adapter("liger-kernel", load, call)
