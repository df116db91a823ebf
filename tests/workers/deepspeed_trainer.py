"""A loop with DeepSpeed's engine: `python deepspeed_trainer.py OUT NAME…`."""

from __future__ import annotations

import logging
import os
from functools import partial
from pathlib import Path

import deepspeed
import torch
from cases import free_port
from telling import STEPS
from trained import Build, Net, Plant, Ready, batches, main

logging.getLogger("DeepSpeed").setLevel(logging.ERROR)


def engine(plant: Plant, out: Path, stage: int, bf16: bool = False) -> Ready:
    """As its documentation writes it."""
    model = Net(plant)
    plant.drops = stage > 0
    plant.poison("weights", model.first.weight)
    poison = plant.between.pop("weights")  # once ZeRO has put its own copy of the weights into the model
    config = {
        "train_micro_batch_size_per_gpu": 4, "gradient_clipping": 1.0, "zero_optimization": {"stage": stage},
        "bf16": {"enabled": bf16}, "zero_allow_untested_optimizer": True,
    }  # fmt: skip
    trained = deepspeed.initialize(model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3), config=config)[0]

    def train() -> None:
        for x, y in batches(plant, STEPS):
            if plant.clock.now("weights"):
                poison()
            kind = torch.bfloat16 if bf16 else torch.float32
            loss = torch.nn.functional.mse_loss(trained(x.to(kind)), y.to(kind))
            trained.backward(loss)
            trained.step()

    return Ready(train, (model,))


BUILDS: dict[str, Build] = {
    "DeepSpeed": partial(engine, stage=0),
    "DeepSpeed ZeRO-1": partial(engine, stage=1),
    "DeepSpeed ZeRO-2, bf16": partial(engine, stage=2, bf16=True),
}

if __name__ == "__main__":
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    torch.distributed.init_process_group("gloo")
    main(BUILDS, "deepspeed", "")
