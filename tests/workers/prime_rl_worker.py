# ruff: noqa: E402 - what stands for its configuration has to be there before prime-rl is read
"""prime-rl's `compute_loss` over packed sequences, with its default and its IPO loss: `python prime_rl_worker.py OUT NAME…`.

Its trainer loop, FSDP2 and vLLM's weights are for CUDA: run it there as it is, under `nanscope run`.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from harness import HALVES, Batch, Case, Trained, absent, arrived, model_of, on_loss

absent(
    prime_rl__configs="",
    prime_rl__configs__trainer="CustomLossConfig DefaultLossConfig IPOLossConfig LossConfig",
    prime_rl__utils__utils="import_object",
)

from prime_rl.trainer.rl import loss as prime

DEFAULTS = {"dppo_mask_low": 0.2, "dppo_mask_high": 0.2, "ipo_threshold": 0.2, "adv_tau": 1.0, "kl_tau": 1e-3}


class PrimeRL(Trained):
    """One step of two packed micro-batches."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        super().__init__(model_of())
        config = SimpleNamespace(**{**DEFAULTS, **settings})
        of = prime.ipo_loss_fn if settings.get("ipo") else prime.default_loss_fn
        self.loss_fn = lambda inputs: of(inputs, config)

    def step(self, data: Batch, number: int) -> None:
        scale = max(int(data.mask.sum()), 1)
        for rows in HALVES:
            old, advantages, mask = arrived((data.old[rows], data.advantages[rows], data.mask[rows].bool()))
            own = self.responses(Batch(data.ids[rows], data.attention[rows], mask, advantages, old, old))
            given = [list(part) for part in (own, old, advantages, mask)]
            loss, _ = prime.compute_loss(given[0], given[1], None, given[2], given[3], None, None, None, self.loss_fn, scale, 1, 1)
            loss.backward()
        self.update()


if __name__ == "__main__":
    on_loss(PrimeRL, "prime_rl", "compute_loss", Case("masked +200, ipo", "masked +200", {"ipo": True}))
