"""Healthy: the first steps of a float16 autocast run overflow in backward, and GradScaler does what it is for.

With the default scale of 65536 the scaled gradients are inf; unscale_ leaves them inf, clip_grad_norm_ reports inf and turns them into NaN (inf * 0).
The scaler saw the inf at unscale_, skips the step and halves its scale; after a few skips training goes on.  No weight is ever touched by a bad step.

Source: https://github.com/Lightning-AI/pytorch-lightning/pull/21426 and https://github.com/pytorch/pytorch/issues/67590.  Healthy.
"""

from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F


def build():
    torch.manual_seed(67590)
    model = nn.Sequential(nn.Embedding(20, 16), nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 20))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
    tokens = torch.randint(0, 20, (4, 9))
    return SimpleNamespace(model=model, optimizer=optimizer, scaler=scaler, batch=tokens)


def run(s=None):
    s = s or build()
    for _ in range(9):
        s.optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            logits = s.model(s.batch[:, :-1])
            token_loss = F.cross_entropy(logits.flatten(0, 1).float(), s.batch[:, 1:].flatten(), reduction="sum")
        s.scaler.scale(token_loss).backward()
        s.scaler.unscale_(s.optimizer)
        grad_norm = nn.utils.clip_grad_norm_(s.model.parameters(), 1.0)
        s.scaler.step(s.optimizer)
        s.scaler.update()
    return token_loss.item(), grad_norm.item(), s.scaler.get_scale()


if __name__ == "__main__":
    print(run())
