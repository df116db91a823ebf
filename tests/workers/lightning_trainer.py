"""Lightning's `Trainer`, and Fabric: `python lightning_trainer.py OUT NAME…`."""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning import Fabric, LightningModule, Trainer
from telling import STEPS
from torch import Tensor
from torch.utils.data import DataLoader
from trained import Build, Net, Plant, Ready, batches, main

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


class Module(LightningModule):
    """A model, its loss and its optimizer."""

    def __init__(self, plant: Plant) -> None:
        super().__init__()
        self.net = Net(plant)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        return torch.nn.functional.mse_loss(self.net(x), y)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class Manual(Module):
    """The same, with an optimization of its own."""

    automatic_optimization = False

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:  # type: ignore[override]
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        self.clip_gradients(optimizer, gradient_clip_val=1.0)
        optimizer.step()


def fitted(plant: Plant, out: Path, module_class: type[Module] = Module, accumulate: int = 1, **settings: Any) -> Ready:
    module = module_class(plant)
    plant.poison("weights", module.net.first.weight)
    trainer = Trainer(
        accelerator="cpu", max_epochs=1, logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        default_root_dir=out, accumulate_grad_batches=accumulate, **settings,
    )  # fmt: skip
    rows = DataLoader(list(batches(plant, STEPS * accumulate, accumulate)), batch_size=None)  # type: ignore[arg-type]
    return Ready(lambda: trainer.fit(module, rows), (module,))


def fabric(plant: Plant, out: Path, precision: Any = "32-true") -> Ready:
    """A loop with Fabric, as its documentation writes it."""
    lightning = Fabric(accelerator="cpu", precision=precision)
    bare = Net(plant)
    plant.poison("weights", bare.first.weight)
    model, optimizer = lightning.setup(bare, torch.optim.AdamW(bare.parameters(), lr=1e-3))
    rows = lightning.setup_dataloaders(DataLoader(list(batches(plant, STEPS)), batch_size=None))  # type: ignore[arg-type]

    def train() -> None:
        for x, y in rows:
            optimizer.zero_grad()
            loss = torch.nn.functional.mse_loss(model(x), y)
            lightning.backward(loss)
            lightning.clip_gradients(model, optimizer, max_norm=1.0)
            optimizer.step()

    return Ready(train, (bare,))


BUILDS: dict[str, Build] = {
    "Lightning": partial(fitted, gradient_clip_val=1.0),
    "Lightning, 2 micro-batches": partial(fitted, accumulate=2),
    "Lightning, manual optimization": partial(fitted, module_class=Manual),
    "Lightning, bf16": partial(fitted, precision="bf16-mixed"),
    "Fabric": fabric,
    "Fabric, bf16": partial(fabric, precision="bf16-mixed"),
}

if __name__ == "__main__":
    main(BUILDS, "lightning", "")
