"""NeMo-RL: `ClippedPGLossFn` with its own config, on one micro-batch that is the whole batch.

Notable: NeMo-RL is not on PyPI: it imports from a checkout on the path. Its tensors cover whole sequences and lose their first column in
the loss, so that a column of zeros goes in front of ours. The counts are of all ranks; left out, they are those of the batch.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from nanscope.frameworks.rows import Setting
from nanscope.native.adapter import Adapter, old_log_probs, only, per_token, present
from nanscope.objective.settings import LossInputs

_COUNTS = ("global_valid_seqs", "global_valid_toks")


def load() -> ModuleType:
    """Import the loss functions."""
    return importlib.import_module("nemo_rl.algorithms.loss.loss_functions")


def call(kind: str, inputs: LossInputs, settings: Mapping[str, Setting]) -> Tensor:
    """Return the first of what `ClippedPGLossFn` returns. Rollout log-probs, which it always reads, are the old ones if left out."""
    losses = load()
    said = only(settings, {*_COUNTS, *losses.ClippedPGLossConfig.model_fields})
    config = losses.ClippedPGLossConfig(**{name: value for name, value in said.items() if name not in _COUNTS})
    mask_BT = inputs.mask.to(inputs.log_probs.dtype)
    old_BT = old_log_probs(inputs)
    data = {
        "token_mask": _whole(mask_BT),
        "sample_mask": torch.ones_like(mask_BT[:, 0]),
        "advantages": _whole(per_token(inputs.advantages, mask_BT)),
        "prev_logprobs": _whole(old_BT),
        "generation_logprobs": _whole(_rollout(config, inputs, old_BT)),
    }
    if config.reference_policy_kl_penalty != 0:
        data["reference_policy_logprobs"] = _whole(present(inputs.ref_log_probs, "ref_log_probs"))
    rows, tokens = said.get("global_valid_seqs"), said.get("global_valid_toks")
    loss: Tensor = losses.ClippedPGLossFn(config)(
        inputs.log_probs,
        data,
        torch.tensor(float(len(mask_BT)) if rows is None else rows),
        mask_BT.sum() if tokens is None else torch.tensor(tokens),
    )[0]
    return loss


def _rollout(config: Any, inputs: LossInputs, old_BT: Tensor) -> Tensor:
    needed = config.use_importance_sampling_correction or config.use_on_policy_kl_approximation
    return present(inputs.rollout_log_probs, "rollout_log_probs") if needed or inputs.rollout_log_probs is not None else old_BT


def _whole(x_BT: Tensor) -> Tensor:
    """Return [B, 1 + T]: the first token of a sequence has no log-prob."""
    return torch.cat([torch.zeros_like(x_BT[:, :1]), x_BT], 1)


ADAPTER = Adapter("nemo-rl", load, call)
