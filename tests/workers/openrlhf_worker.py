# ruff: noqa: E402 - what stands for CUDA's packages has to be there before OpenRLHF is read
"""OpenRLHF's `ActorPPOTrainer.training_step`: with a plain engine, and with DeepSpeed's: `python openrlhf_worker.py OUT NAME…`."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from harness import FLASH_ATTENTION, Batch, Case, absent, arrived, main, tiny

absent(openrlhf__trainer__ray__vllm_engine="batch_vllm_engine_call create_vllm_engines", **FLASH_ATTENTION)

import deepspeed
import torch
from openrlhf.models import Actor, PolicyLoss
from openrlhf.trainer.ppo_utils.experience import Experience
from openrlhf.trainer.ray.ppo_actor import ActorPPOTrainer
from openrlhf.utils.deepspeed import DeepspeedStrategy
from openrlhf.utils.loss_utils import iter_grad_accum_global_norm
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

MICRO = 2  # micro-batches of a step


class Plain(nn.Module):
    """What a DeepSpeed engine does for a trainer, in the fewest lines."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module, self.optimizer, self.count = module, torch.optim.AdamW(module.parameters()), 0

    def forward(self, *given: Any, **named: Any) -> Any:
        return self.module(*given, **named)

    def backward(self, loss: Tensor) -> None:
        (loss / MICRO).backward()

    def step(self) -> None:
        self.count += 1
        if self.count % MICRO == 0:
            nn.utils.clip_grad_norm_(self.parameters(), 1.0)
            self.optimizer.step()
            self.optimizer.zero_grad()


def engine(module: nn.Module, stage: int | None) -> Any:
    """Return the engine that trains a model: DeepSpeed's of a stage of ZeRO, or none of it."""
    if stage is None:
        return Plain(module)
    config = {
        "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": MICRO, "gradient_clipping": 1.0, "zero_optimization": {"stage": stage},
        "bf16": {"enabled": stage > 0}, "zero_allow_untested_optimizer": True,
    }  # fmt: skip
    made: Any = deepspeed.initialize(model=module, optimizer=torch.optim.AdamW(module.parameters()), config=config)[0]
    return made


class OpenRLHF:
    """The actor's trainer with all that its `training_step` reads; what it needs of Ray and CUDA is never asked for."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        given = dict(settings)
        stage = given.pop("stage", None)
        kl = SimpleNamespace(
            use_loss=given.pop("use_kl_loss", False), init_coef=0.01, estimator=given.pop("kl_estimator", "k3"), unbiased_gradient=False
        )
        args = SimpleNamespace(
            actor=SimpleNamespace(entropy_coef=None, aux_loss_coef=0.0),
            algo=SimpleNamespace(kl=kl),
            train=SimpleNamespace(dynamic_batch_enable=False),
        )
        strategy = DeepspeedStrategy.__new__(DeepspeedStrategy)
        strategy.args, strategy.accumulated_gradient = args, MICRO
        actor = Actor(
            AutoModelForCausalLM.from_pretrained(MODEL, attn_implementation="eager", dtype=torch.bfloat16 if stage else torch.float32)
        )
        actor.model, actor.packing_samples = engine(actor.model, stage), False
        trainer = self.trainer = ActorPPOTrainer.__new__(ActorPPOTrainer)
        trainer.strategy, trainer.args, trainer.actor, trainer.ema_model, trainer.aux_loss, trainer.replay_buffer = (
            strategy,
            args,
            actor,
            None,
            False,
            None,
        )
        trainer.actor_optim, trainer.actor_scheduler = actor.model.optimizer, SimpleNamespace(get_last_lr=lambda: [1e-3])
        trainer.actor_loss_fn = PolicyLoss(**given)

    def optimizer(self) -> Any:
        return self.trainer.actor_optim

    def log_probs(self, data: Batch) -> Tensor:
        with torch.no_grad():
            found: Tensor = self.trainer.actor(data.ids, data.mask, attention_mask=data.attention)
        return found.float()

    def step(self, data: Batch, number: int) -> None:
        experiences = [
            arrived(
                Experience(
                    sequences=data.ids[rows], attention_mask=data.attention[rows], action_mask=data.mask[rows], action_log_probs=data.old[rows],
                    base_action_log_probs=data.ref[rows], rollout_log_probs=data.old[rows], advantages=data.advantages[rows],
                )
            )
            for rows in (slice(0, 2), slice(2, 4))
        ]  # fmt: skip
        for step, (experience, info) in enumerate(
            iter_grad_accum_global_norm(experiences, self.trainer.strategy, MICRO, lambda e: e.action_mask)
        ):
            self.trainer.training_step(experience, 0.01, step, info)


CASES = (
    Case("healthy", "healthy"),
    Case("healthy kl", "healthy", {"use_kl_loss": True}),
    Case("masked +200", "masked +200"),
    Case("old -inf", "old -inf"),
    Case("masked micro-batch", "masked micro-batch"),
    Case("masked batch", "masked batch"),
    Case("weights", "weights", {"use_kl_loss": True}),
    *(
        Case(f"zero{stage} {fault}", fault, {"stage": stage})
        for stage in (0, 2)
        for fault in ("healthy", "masked +200", "masked micro-batch", "masked batch", "old -inf", "weights")
    ),
)

if __name__ == "__main__":
    MODEL = tiny(Path(sys.argv[1]) / "model")
    torch.distributed.init_process_group("gloo")
    main(OpenRLHF, CASES, "openrlhf", "ActorPPOTrainer.training_step")
