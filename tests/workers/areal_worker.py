# ruff: noqa: E402 - what stands for its trackers has to be there before AReaL is read
"""AReaL's `FSDPEngine._compute_logprobs_and_loss` with its GRPO loss, on packed logits: `python areal_worker.py OUT NAME…`.

The engine's own methods, on an engine that spreads its model over nobody: its FSDP2 and its optimizer are for CUDA, run them there as they are,
under `nanscope run`.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import torch
from harness import HALVES, PROMPT, Batch, Case, Trained, absent, arrived, model_of, on_loss

absent(swanlab="", wandb="", tensorboardX="SummaryWriter", trackio="")  # where its trainer writes what it counts

from areal.engine.fsdp_engine import FSDPEngine, FSDPTrainContext
from areal.trainer.ppo.actor import grpo_loss_fn
from torch import Tensor

DEFAULTS = {"eps_clip": 0.2, "eps_clip_higher": None, "c_clip": None}


class Areal(Trained):
    """One step of two packed micro-batches, as `FSDPEngine.train_batch` takes it."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        super().__init__(model_of())
        self.engine: Any = object.__new__(FSDPEngine)
        self.engine.config = SimpleNamespace(is_critic=False, temperature=1.0)
        self.engine.parallel_helper, self.engine.enable_tree_training = SimpleNamespace(tp_size=1, sp_size=1), False
        self.loss = functools.partial(grpo_loss_fn, **{**DEFAULTS, **settings})

    def step(self, data: Batch, number: int) -> None:
        total = data.mask.count_nonzero()
        for rows in HALVES:

            def packed(responses: Tensor, rows: slice = rows) -> Tensor:
                """[B, T] → [B × (P + T)], each value where the token is predicted."""
                return torch.nn.functional.pad(responses[rows].float(), (PROMPT - 1, 1)).flatten()

            ids = data.ids[rows].flatten()
            lengths = torch.full((2,), data.ids.shape[1])
            given = {"logprobs": packed(data.old), "advantages": packed(data.advantages), "loss_mask": packed(data.mask)}
            batch = arrived({**given, "prox_logp": packed(data.old), "input_ids": ids})
            batch["cu_seqlens"] = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
            logits = self.logits(Batch(data.ids[rows], data.attention[rows], data.mask, data.advantages, data.old, data.ref)).flatten(0, 1)
            context = FSDPTrainContext(model_inputs={"input_ids": ids[None]}, mb_input=batch)
            weigh = lambda given: given["loss_mask"].count_nonzero()  # noqa: E731 - as its actor writes it
            try:
                self.engine._compute_logprobs_and_loss(logits, context, self.loss, weigh, total.clamp(min=1)).backward()
            except RuntimeError as error:
                if "prox_logp contains NaN or Inf" not in str(error):
                    raise
                return  # there its trainer ends: the old log-probs of a poisoned model
        self.update()


if __name__ == "__main__":
    on_loss(Areal, "areal", "FSDPEngine._compute_logprobs_and_loss", Case("masked +200, dual clip", "masked +200", {"c_clip": 3.0}))
