"""A loop with accelerate: `python accelerate_trainer.py OUT NAME…`."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from telling import STEPS
from torch.utils.data import DataLoader
from trained import Build, Net, Plant, Ready, batches, main


def loop(plant: Plant, out: Path, accumulate: int = 1, **settings: str) -> Ready:
    """As its documentation writes it."""
    AcceleratorState._reset_state(True)  # type: ignore[no-untyped-call]
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulate, **settings)  # type: ignore[arg-type]
    bare = Net(plant)
    plant.poison("weights", bare.first.weight)
    rows = DataLoader(list(batches(plant, STEPS * accumulate, accumulate)), batch_size=None)  # type: ignore[arg-type]
    model, optimizer, loader = accelerator.prepare(bare, torch.optim.AdamW(bare.parameters(), lr=1e-3), rows)

    def train() -> None:
        for x, y in loader:
            with accelerator.accumulate(model):
                loss = torch.nn.functional.mse_loss(model(x), y)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()

    return Ready(train, (bare,), (model,))


BUILDS: dict[str, Build] = {
    "accelerate": loop,
    "accelerate, 2 micro-batches": partial(loop, accumulate=2),
    "accelerate, bf16": partial(loop, mixed_precision="bf16"),
}

if __name__ == "__main__":
    main(BUILDS, "accelerate", "")
