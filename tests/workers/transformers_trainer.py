"""`transformers.Trainer`: `python transformers_trainer.py OUT NAME…`."""

from __future__ import annotations

import math
import sys
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from telling import STEPS
from torch import Tensor
from trained import Build, Net, Plant, Ready, faulty, main
from transformers import PrinterCallback, Trainer, TrainingArguments
from trl_runs import SEED, make_model, make_tokenizer, quiet_settings


def trained(
    plant: Plant, out: Path, model: Any, rows: list[dict[str, Tensor]], spoil: Any, accumulate: int, weight: str, **settings: Any
) -> Ready:
    given = {
        **quiet_settings(out),
        "max_steps": STEPS,
        "per_device_train_batch_size": 4 // accumulate,
        "gradient_accumulation_steps": accumulate,
        **settings,
    }
    arguments: Any = TrainingArguments(**given)
    trainer = Trainer(model=model, args=arguments, train_dataset=rows)  # type: ignore[arg-type]
    collate = trainer.data_collator
    trainer.data_collator = lambda examples: plant.spoilt(collate(examples), spoil, accumulate)
    trainer.remove_callback(PrinterCallback)
    plant.poison("weights", model.get_parameter(weight))
    return Ready(trainer.train, (model,), (trainer,))


def regression(plant: Plant, out: Path, accumulate: int = 1, **settings: Any) -> Ready:
    """A model of one's own, whose rows are floats."""
    generator = torch.Generator().manual_seed(SEED)
    rows = [{"x": torch.randn(3, generator=generator), "labels": torch.randn(1, generator=generator)} for _ in range(12)]
    spoil = lambda batch: batch["x"].__setitem__((1, 1), math.nan)  # noqa: E731
    return trained(plant, out, Net(plant), rows, spoil, accumulate, "first.weight", **settings)


def language(plant: Plant, out: Path, accumulate: int = 1, **settings: Any) -> Ready:
    """A language model; the fault of the input is that no token is to be learnt."""
    generator = torch.Generator().manual_seed(SEED)
    ids = [torch.randint(3, 19, (8,), generator=generator) for _ in range(12)]
    rows = [{"input_ids": row, "labels": row.clone()} for row in ids]
    spoil = lambda batch: batch["labels"].fill_(-100)  # noqa: E731
    model = faulty(make_model(make_tokenizer()), plant)
    return trained(plant, out, model, rows, spoil, accumulate, "model.layers.0.mlp.up_proj.weight", **settings)


BUILDS: dict[str, Build] = {
    "Trainer": regression,
    "Trainer, language model": language,
    "Trainer, 2 micro-batches": partial(regression, accumulate=2),
    "Trainer, label smoothing": partial(language, label_smoothing_factor=0.1),
    "Trainer, no clipping": partial(language, max_grad_norm=0.0),
    "Trainer, bf16, checkpointing": partial(language, bf16=True, gradient_checkpointing=True),
}

if __name__ == "__main__":
    main(BUILDS, "transformers", "")
