# ruff: noqa: E402 - the platform has to be there before verl asks for it
"""verl's `TrainingWorker` with its `FSDPEngine`, on FSDP2 over gloo: `RANK=… WORLD_SIZE=… python verl_worker.py OUT NAME…`."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ.update(VERL_PLATFORM="cpu", VERL_ENGINE_DEVICE="cuda", RAY_USAGE_STATS_ENABLED="0", VERL_LOGGING_LEVEL="ERROR")

import torch
from harness import PROMPT, Batch, Case, arrived, main, tiny
from torch import Tensor
from transformers import AutoModelForTokenClassification
from verl.plugin.platform import PlatformBase, PlatformRegistry

OWN = {
    "device_name": "cpu",
    "vendor_name": "none",
    "device_module": SimpleNamespace(
        max_memory_allocated=lambda: 0, max_memory_reserved=lambda: 0, memory_allocated=lambda: 0, memory_reserved=lambda: 0,
        mem_get_info=lambda: (0, 0), empty_cache=lambda: None, is_available=lambda: False, set_device=lambda index: None, get_device_name=lambda: "CPU",
    ),
    "is_available": lambda self: True,
    "current_device": lambda self: torch.device("cpu"),
    "communication_backend_name": lambda self: "gloo",
    "visible_devices_envvar": lambda self: "CUDA_VISIBLE_DEVICES",
    "ray_resource_name": lambda self: "CPU",
    "ray_noset_envvars": lambda self: [],
}  # fmt: skip
REST = {name: lambda self, *given, **named: None for name in PlatformBase.__abstractmethods__}
PlatformRegistry.register(platform="cpu")(type("Cpu", (PlatformBase,), REST | OWN))  # a machine without an accelerator

from verl.trainer.config import CheckpointConfig
from verl.utils import tensordict_utils as tu
from verl.workers.config import (
    FSDPActorConfig,
    FSDPCriticConfig,
    FSDPEngineConfig,
    FSDPOptimizerConfig,
    HFModelConfig,
    PolicyLossConfig,
    TrainingWorkerConfig,
)
from verl.workers.engine_workers import TrainingWorker
from verl.workers.utils.losses import ppo_loss, value_loss
from verl.workers.utils.padding import left_right_2_no_padding, no_padding_2_padding


class Verl:
    """The actor: `infer_batch` for old log-probs, `train_mini_batch` for a step of two micro-batches."""

    kind, loss, config = "language_model", staticmethod(ppo_loss), FSDPActorConfig

    def __init__(self, settings: Mapping[str, Any]) -> None:
        given = dict(settings)
        strategy = given.pop("strategy", "fsdp2")
        if "loss_mode" in given:
            given["policy_loss"] = PolicyLossConfig(loss_mode=given.pop("loss_mode"))
        own = {"rollout_n": 1, "ppo_micro_batch_size_per_gpu": 2, "strategy": strategy}
        self.worker = TrainingWorker(
            TrainingWorkerConfig(
                model_type=self.kind,
                model_config=HFModelConfig(path=str(MODEL), load_tokenizer=False, override_config={"attn_implementation": "sdpa"}),
                engine_config=FSDPEngineConfig(
                    strategy=strategy, use_torch_compile=False, micro_batch_size_per_gpu=2, infer_micro_batch_size_per_gpu=2, use_dynamic_bsz=False,
                    mixed_precision={"param_dtype": given.pop("dtype", "fp32"), "reduce_dtype": "fp32", "buffer_dtype": "fp32"},
                ),
                optimizer_config=FSDPOptimizerConfig(lr=1e-3, total_training_steps=10),
                checkpoint_config=CheckpointConfig(),
            )
        )  # fmt: skip
        self.worker.reset()
        self.worker.set_loss_fn(partial(self.loss, config=self.config(**own, **given)))

    def optimizer(self) -> torch.optim.Optimizer:
        found: torch.optim.Optimizer = self.worker.engine.optimizer
        return found

    def data(self, data: Batch, **more: Any) -> Any:
        """The batch as it comes to a worker: packed, from another process."""
        tensors = {
            "prompts": data.ids[:, :PROMPT], "responses": data.ids[:, PROMPT:], "input_ids": data.ids, "attention_mask": data.attention,
            "position_ids": (data.attention.cumsum(1) - 1).clamp(min=0), "response_mask": data.mask, "old_log_probs": data.old,
            "ref_log_prob": data.ref, "advantages": data.advantages, "values": data.old, "returns": data.advantages,
        }  # fmt: skip
        return arrived(left_right_2_no_padding(tu.get_tensordict(tensors, {"temperature": 1.0, **more})))

    def log_probs(self, data: Batch) -> Tensor:
        given = self.data(data, calculate_entropy=False, compute_loss=False)
        found: Tensor = no_padding_2_padding(tu.get(self.worker.infer_batch(given), "log_probs"), given).float()
        return found

    def step(self, data: Batch, number: int) -> None:
        count = len(data.ids) * self.worker.world_size
        given = self.data(
            data,
            global_batch_size=count,
            mini_batch_size=count,
            epochs=1,
            seed=1,
            dataloader_kwargs={"shuffle": False},
            global_steps=number,
        )
        self.worker.train_mini_batch(given)


class Critic(Verl):
    """The critic: its old values stand where the old log-probs are."""

    kind, loss, config = "value_model", staticmethod(value_loss), FSDPCriticConfig

    def log_probs(self, data: Batch) -> Tensor:
        given = self.data(data, compute_loss=False)
        found: Tensor = no_padding_2_padding(tu.get(self.worker.infer_batch(given), "values"), given).float()
        return found


def worker(settings: Mapping[str, Any]) -> Verl:
    """Return the worker that the settings ask for."""
    given = dict(settings)
    return Critic(given) if given.pop("critic", False) else Verl(given)


def without_flash_attention(load: Callable[..., Any], *given: Any, **named: Any) -> Any:
    """Load a critic, for which verl asks for a kernel that needs CUDA whatever its options say."""
    return load(*given, **{**named, "attn_implementation": "sdpa"})


AutoModelForTokenClassification.from_pretrained = partial(without_flash_attention, AutoModelForTokenClassification.from_pretrained)

OPEN = {"loss_mode": "kl_cov"}  # does not clamp the log-ratio
ROWS_MULTIPLY = {"loss_agg_mode": "seq-mean-token-mean"}
CASES = (
    Case("healthy", "healthy"),
    Case("healthy kl", "healthy", {"use_kl_loss": True}),
    Case("masked +200, clamped", "masked +200"),
    Case("masked +200", "masked +200", OPEN),
    Case("old -inf", "old -inf"),
    Case("masked micro-batch", "masked micro-batch"),
    Case("masked batch", "masked batch"),
    Case("old -inf, open", "old -inf", OPEN),
    Case("masked -inf", "masked -inf", ROWS_MULTIPLY),
    Case("weights", "weights", {"use_kl_loss": True}),
    Case("critic healthy", "healthy", {"critic": True}),
    Case("critic old -inf", "old -inf", {"critic": True}),
    Case("critic weights", "weights", {"critic": True}),
)

if __name__ == "__main__":
    MODEL = tiny(Path(sys.argv[1]) / "model")
    torch.distributed.init_process_group("gloo")
    torch.distributed.barrier()
    main(worker, CASES, "verl", "TrainingWorker.train_mini_batch")
