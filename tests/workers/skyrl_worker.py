# ruff: noqa: E402 - SkyRL's types need Python 3.12 unless they are told otherwise before they are read
"""SkyRL's `PolicyWorkerBase._forward_backward_micro` and `optim_step`, with its FSDP strategy: `python skyrl_worker.py OUT NAME…`."""

from __future__ import annotations

import sys
import typing
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import typing_extensions

if sys.version_info < (3, 12):
    typing.TypedDict = typing_extensions.TypedDict

from harness import FLASH_ATTENTION, ROWS, Batch, Case, absent, arrived, main, tiny

absent(**FLASH_ATTENTION)

import torch
from skyrl.backends.skyrl_train.distributed.fsdp_strategy import FSDPStrategy
from skyrl.backends.skyrl_train.utils.ppo_utils import AlgorithmConfig, PolicyLossRegistry
from skyrl.backends.skyrl_train.workers.model_wrapper import HFModelWrapper
from skyrl.backends.skyrl_train.workers.worker import PolicyWorkerBase
from skyrl.train.dataset.replay_buffer import Experience
from torch import Tensor

torch.cuda.current_device = lambda: "cpu"  # where the worker sends its batch


class SkyRL:
    """The policy's worker with all that a step of it reads; what it needs of Ray is never asked for."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        worker = self.worker = PolicyWorkerBase.__new__(PolicyWorkerBase)
        worker.cfg = SimpleNamespace(algorithm=AlgorithmConfig(temperature=1.0, **settings))
        worker.policy_loss_fn = PolicyLossRegistry.get(worker.cfg.algorithm.policy_loss_type)
        worker.model = HFModelWrapper(str(MODEL), bf16=False)
        worker.optimizer = torch.optim.AdamW(worker.model.parameters())
        worker.scheduler = torch.optim.lr_scheduler.ConstantLR(worker.optimizer, 1.0)
        worker.mesh_rank = SimpleNamespace(dp_size=1)
        worker.strategy = FSDPStrategy.__new__(FSDPStrategy)
        worker.strategy.max_norm = 1.0

    def optimizer(self) -> torch.optim.Optimizer:
        found: torch.optim.Optimizer = self.worker.optimizer
        return found

    def log_probs(self, data: Batch) -> Tensor:
        with torch.no_grad():
            found: Tensor = self.worker.model(data.ids, data.mask.shape[1], attention_mask=data.attention)
        return found

    def step(self, data: Batch, number: int) -> None:
        """Two micro-batches; as its controller does, the advantages are divided by the tokens that count."""
        scale = data.mask.sum().clamp(min=1)
        for rows in (slice(0, ROWS // 2), slice(ROWS // 2, ROWS)):
            experience = Experience(
                sequences=data.ids[rows], action_log_probs=data.old[rows], base_action_log_probs=data.ref[rows], values=None, returns=None,
                advantages=data.advantages[rows] / scale, attention_mask=data.attention[rows], loss_mask=data.mask[rows], action_mask=data.mask[rows],
                rollout_logprobs=data.old[rows], rollout_expert_indices=None, num_actions=data.mask.shape[1], info={},
            )  # fmt: skip
            self.worker._forward_backward_micro(arrived(experience), 0.5)
        self.worker.optim_step()


OPEN = {"policy_loss_type": "importance_sampling"}  # does not clamp the log-ratio
CASES = (
    Case("healthy", "healthy"),
    Case("healthy kl", "healthy", {"use_kl_loss": True}),
    Case("masked +200, clamped", "masked +200"),
    Case("masked +200", "masked +200", OPEN),
    Case("old -inf, clamped", "old -inf"),
    Case("old -inf", "old -inf", OPEN),
    Case("masked micro-batch", "masked micro-batch"),
    Case("masked batch", "masked batch", {"use_kl_loss": True}),
    Case("weights", "weights", {"use_kl_loss": True}),
)

if __name__ == "__main__":
    MODEL = tiny(Path(sys.argv[1]) / "model")
    main(SkyRL, CASES, "skyrl", "PolicyWorkerBase._forward_backward_micro, optim_step")
