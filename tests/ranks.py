"""A training script for two processes: `python ranks.py RANK PORT OUT ddp|manual`. Rank 1 gets a batch without a single counted token.

"manual" averages the gradients by hand and clips them, instead of leaving both to DistributedDataParallel and nobody.
"""

from __future__ import annotations

import os
import sys

import torch
from torch import nn

import nanscope


class Policy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.head = nn.Linear(6, 11)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.embed(ids))
        return out


def main(rank: int, port: str, out: str, manner: str) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port, RANK=str(rank), WORLD_SIZE="2")
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    torch.manual_seed(0)
    model: nn.Module = nn.parallel.DistributedDataParallel(Policy()) if manner == "ddp" else Policy()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with nanscope.watch(out=out) as scope:
        for step in range(3):
            ids = torch.randint(0, 11, (2, 5))
            mask = torch.ones(2, 4)
            if rank == 1 and step == 1:
                mask.zero_()
            logps = model(ids[:, :-1]).log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)
            loss = -(logps * mask).sum() / mask.sum()
            optimizer.zero_grad()
            loss.backward()
            if manner == "manual":
                for parameter in model.parameters():
                    torch.distributed.all_reduce(parameter.grad)
                    parameter.grad /= 2
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
    first = scope.verdict.incidents[0]
    print(len(scope.verdict.incidents), first.rank, first.step, first.cause, first.origin.op, scope.verdict.sentence, sep="|")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:5])
