"""Lightning's trainer itself, with a logger that writes a file."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import left_installed
from doors import policy_loss

import nanscope

lightning = pytest.importorskip("lightning", reason="lightning is not installed")

STEPS, BAD = 4, 3


class Policy(lightning.LightningModule):  # type: ignore[misc]
    """A policy whose third batch has an old log-prob that overflows at a masked token; or that raises there."""

    def __init__(self, fault: str = "") -> None:
        super().__init__()
        self.layer, self.fault = torch.nn.Linear(4, 6), fault

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        log_probs = torch.log_softmax(self.layer(batch[0]), dim=-1)
        old_log_probs, mask = log_probs.detach() - 0.1, torch.ones_like(log_probs)
        mask[:, 5] = 0
        if self.fault and index == BAD - 1:
            if self.fault == "raise":
                raise ValueError("enough")
            old_log_probs[0, 5] -= 200.0
        return policy_loss(log_probs, old_log_probs, torch.ones(2, 1), mask)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def fit(folder: Path, callbacks: list[Any], fault: str = "", every: int = 1) -> tuple[Policy, list[dict[str, str]]]:
    """Fit, and return the model and the rows that the logger wrote."""
    from lightning.pytorch.loggers import CSVLogger

    torch.manual_seed(0)
    model = Policy(fault)
    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(2 * STEPS, 4)), batch_size=2)
    logger = CSVLogger(str(folder))
    trainer = lightning.Trainer(
        max_epochs=1, accelerator="cpu", logger=logger, callbacks=callbacks, log_every_n_steps=every,
        enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False, default_root_dir=str(folder),
    )  # fmt: skip
    trainer.fit(model, data)
    logger.save()
    files = list(folder.rglob("metrics.csv"))
    return model, list(csv.DictReader(files[0].open())) if files else []


def test_its_loggers_get_the_numbers(tmp_path: Path) -> None:
    """Each step in the file, and the verdict afterwards."""
    watching = nanscope.integrations.LightningCallback(out=tmp_path / "runs")
    _, rows = fit(tmp_path / "logs", [watching], "overflow")
    assert [float(row["nanscope/bad_steps"]) for row in rows] == [0, 0, 1, 2]
    assert float(rows[BAD - 1]["nanscope/headroom_nats"]) < 0 < float(rows[0]["nanscope/headroom_nats"])
    assert watching.scope.verdict.incidents[0].step == BAD and left_installed() == []


def test_as_often_as_it_logs(tmp_path: Path) -> None:
    """With `log_every_n_steps=2` two rows, of two steps each."""
    watching = nanscope.integrations.LightningCallback(out=tmp_path / "runs")
    _, rows = fit(tmp_path / "logs", [watching], "overflow", every=2)
    assert [(int(row["step"]), float(row["nanscope/bad_steps"])) for row in rows] == [(1, 0), (3, 2)]


def test_the_weights_are_the_same_to_the_bit(tmp_path: Path) -> None:
    """With and without."""
    bare, _ = fit(tmp_path / "bare", [], "overflow")
    watched, _ = fit(tmp_path / "watched", [nanscope.integrations.LightningCallback(out=tmp_path / "runs")], "overflow")
    for one, other in zip(bare.parameters(), watched.parameters(), strict=True):
        assert torch.equal(one.view(torch.int32), other.view(torch.int32))


def test_nothing_stays_when_training_raises(tmp_path: Path) -> None:
    """The exception passes, the hooks are gone."""
    watching = nanscope.integrations.LightningCallback(out=tmp_path / "runs")
    with pytest.raises(ValueError, match="enough"):
        fit(tmp_path / "logs", [watching], "raise")
    assert left_installed() == [] and watching.scope.steps == BAD - 1
