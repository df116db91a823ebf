"""Half training with a static loss scale, the loss itself in half (the fp16 wrapper of DeepSpeed before it cast the loss to float).  Healthy.

loss * 16384 passes 65504: scaled_loss reads inf. But the derivative of a product does not read its value: backward starts with 16384, every gradient is finite, the
unscaled gradients agree with fp32 and the master weights move as they should. Only a log of scaled_loss would look bad.
Source: https://github.com/deepspeedai/DeepSpeed/blob/master/deepspeed/runtime/fp16/fused_optimizer.py (backward: scaled_loss)
"""

from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F


def build():
    torch.manual_seed(10)
    model = nn.Sequential(nn.Embedding(400, 16), nn.LayerNorm(16), nn.Linear(16, 400)).half()
    master = [p.detach().float().requires_grad_() for p in model.parameters()]
    optimizer = torch.optim.AdamW(master, lr=1e-3)
    return SimpleNamespace(model=model, master=master, optimizer=optimizer, batch={"input_ids": torch.randint(0, 400, (4, 17))})


def run(s=None, loss_scale=16384.0):
    s = s or build()
    ids = s.batch["input_ids"]
    for _ in range(3):
        loss = F.cross_entropy(s.model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        scaled_loss = loss * loss_scale
        s.model.zero_grad()
        scaled_loss.backward()
        for p, m in zip(s.model.parameters(), s.master):
            m.grad = p.grad.float() / loss_scale
        nn.utils.clip_grad_norm_(s.master, 1.0)
        s.optimizer.step()
        with torch.no_grad():
            for p, m in zip(s.model.parameters(), s.master):
                p.copy_(m)
    return loss.item()


if __name__ == "__main__":
    print(run())
