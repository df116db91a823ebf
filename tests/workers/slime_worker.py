# ruff: noqa: E402 - what stands for Megatron has to be there before slime is read
"""slime's `loss_function` over a packed micro-batch, vocabulary-parallel log-probs and all: `python slime_worker.py OUT NAME…`.

Of Megatron, which trains there, only the sizes of its groups are asked, and they are 1. Its schedules and its optimizer are for CUDA: run them
there as they are, under `nanscope run`.
"""

from __future__ import annotations

import functools
import sys
from argparse import Namespace
from collections.abc import Mapping
from typing import Any

import torch
from harness import HALVES, PROMPT, Batch, Case, Trained, absent, arrived, model_of, on_loss

SIZES = [
    f"get_{group}_{what}"
    for group in ("context_parallel", "tensor_model_parallel", "data_parallel")
    for what in ("world_size", "rank", "group")
]
absent(
    megatron="", megatron__core="mpu", slime__backends__megatron_utils__megatron_patch="",
    megatron__core__mpu=" ".join([*SIZES, "is_pipeline_last_stage"]),
)  # fmt: skip
mpu = sys.modules["megatron.core"].mpu = sys.modules["megatron.core.mpu"]  # type: ignore[attr-defined]
ALONE = {"world_size": 1, "rank": 0, "group": None}
vars(mpu).update({name: functools.partial(lambda answer, **named: answer, ALONE[name.rpartition("parallel_")[2]]) for name in SIZES})

from slime.backends.megatron_utils.loss import loss_function

DEFAULTS = {
    "loss_type": "policy_loss", "advantage_estimator": "grpo", "eps_clip": 0.2, "eps_clip_high": 0.2, "eps_clip_c": None, "entropy_coef": 0.0,
    "use_kl_loss": False, "kl_loss_coef": 0.0, "kl_loss_type": "low_var_kl", "use_unbiased_kl": False, "use_tis": False, "use_opsm": False,
    "get_mismatch_metrics": False, "use_rollout_logprobs": False, "use_opd": False, "calculate_per_token_loss": False, "allgather_cp": False,
    "recompute_loss_function": False, "rollout_temperature": 1.0, "rollout_top_p": 1.0, "log_probs_chunk_size": -1,
    "custom_pg_loss_reducer_function_path": None,
}  # fmt: skip


class Slime(Trained):
    """One step of two packed micro-batches, as Megatron's schedule calls the loss."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        super().__init__(model_of())
        self.args = Namespace(**{**DEFAULTS, **settings})

    def step(self, data: Batch, number: int) -> None:
        for rows in HALVES:
            ids, mask = data.ids[rows], data.mask[rows].float()
            lists = {"advantages": data.advantages[rows], "log_probs": data.old[rows], "ref_log_probs": data.ref[rows], "loss_masks": mask}
            batch = arrived({name: list(value) for name, value in lists.items()})
            total, response = ids.shape[1], ids.shape[1] - PROMPT
            batch |= {"unconcat_tokens": list(ids), "total_lengths": [total] * len(ids), "response_lengths": [response] * len(ids)}
            batch |= {"rollout_mask_sums": [row.sum() for row in mask]}
            logits = self.logits(Batch(ids, data.attention[rows], mask, data.advantages, data.old, data.ref)).flatten(0, 1)[None]
            loss, *_ = loss_function(self.args, batch, 2, len(data.ids), logits)
            loss.backward()
        self.update()


if __name__ == "__main__":
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    kl = Case("healthy kl", "healthy", {"use_kl_loss": True, "kl_loss_coef": 0.01})
    on_loss(Slime, "slime", "loss_function", kl, Case("masked +200, cispo", "masked +200", {"advantage_estimator": "cispo"}))
