"""GRPO with the sequence-level truncated importance weight of the sampler mismatch (mode "sequence_truncate"). Healthy.

One completion was sampled with a badly quantised engine: its summed log difference is about 120 and exp of it is inf. The weight is made without gradient, and
clamp(max=C) turns inf into C = 3 before it touches the loss; nothing flows backward through exp. Loss, gradients and weights are finite.

Source: https://github.com/huggingface/trl/issues/4493 (sequence-level TIS), trl/trainer/grpo_trainer.py.
"""

from types import SimpleNamespace

import torch
import torch.nn as nn


class Policy(nn.Module):
    def __init__(self, vocab=30, dim=16):
        super().__init__()
        self.emb = nn.Embedding(vocab, dim)
        self.fc = nn.Linear(dim, dim)
        self.head = nn.Linear(dim, vocab)

    def forward(self, ids):
        return self.head(torch.tanh(self.fc(self.emb(ids))))


def per_token_logps(model, ids):
    return model(ids)[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:].unsqueeze(-1)).squeeze(-1)


def build():
    torch.manual_seed(4493)
    model = Policy()
    ids = torch.randint(0, 30, (4, 11))
    mask = torch.ones(4, 10)
    mask[3, 6:] = 0
    with torch.no_grad():
        old = per_token_logps(model, ids)
    sampling = old + 0.01 * torch.randn_like(old)
    sampling[2] = old[2] - 12.0
    batch = dict(ids=ids, mask=mask, old=old, sampling=sampling, advantages=torch.tensor([1.0, -1.0, 0.6, -0.6]))
    return SimpleNamespace(model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3), batch=batch)


def run(s=None):
    s = s or build()
    b = s.batch
    losses = []
    for _ in range(3):
        with torch.no_grad():
            logps_diff = ((b["old"] - b["sampling"]) * b["mask"]).sum(dim=-1, keepdim=True)
            importance_sampling_ratio = torch.exp(logps_diff)
            importance_sampling_ratio = torch.clamp(importance_sampling_ratio, max=3.0)
        coef_1 = torch.exp(per_token_logps(s.model, b["ids"]) - b["old"])
        coef_2 = torch.clamp(coef_1, 0.8, 1.2)
        adv = b["advantages"].unsqueeze(1)
        per_token_loss = -torch.min(coef_1 * adv, coef_2 * adv) * importance_sampling_ratio
        loss = ((per_token_loss * b["mask"]).sum(-1) / b["mask"].sum(-1).clamp(min=1.0)).mean()
        s.optimizer.zero_grad()
        loss.backward()
        s.optimizer.step()
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    print(run())
