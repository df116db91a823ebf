"""Atropos' example GRPO trainer logs the mean log-prob of positive and negative samples as (logp * mask).sum(-1) / mask.sum(-1). A padding sample has no
trained token, its mean is 0 / 0 and the logged number NaN, under no_grad and after the loss has been made: the training is healthy.

Source: https://github.com/NousResearch/atropos/pull/236.
"""

from types import SimpleNamespace

import torch
import torch.nn as nn


class Policy(nn.Module):
    def __init__(self, vocab=18, dim=8):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.rnn = nn.GRU(dim, dim, batch_first=True)
        self.lm_head = nn.Linear(dim, vocab)

    def forward(self, ids):
        return self.lm_head(self.rnn(self.embed(ids))[0])


def build():
    torch.manual_seed(236)
    model = Policy()
    tokens = torch.randint(0, 18, (4, 8))
    labels = tokens[:, 1:].clone()
    labels[:, :2] = -100
    labels[3] = -100  # pads the batch to a good size
    advantages = torch.tensor([[1.0], [-0.5], [-0.5], [0.0]])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    return SimpleNamespace(model=model, optimizer=optimizer, tokens=tokens, labels=labels, advantages=advantages)


def run(s=None):
    s = s or build()
    logits = s.model(s.tokens[:, :-1])
    logp_per_token = -nn.functional.cross_entropy(logits.transpose(1, 2), s.labels, reduction="none", ignore_index=-100)
    mask = (s.labels != -100).float()

    grpo_loss_term = torch.exp(logp_per_token - logp_per_token.detach())
    per_sequence = (-grpo_loss_term * s.advantages * mask).sum(-1) / mask.sum(-1).clamp(min=1)
    loss = per_sequence.mean()

    with torch.no_grad():
        pos = (s.advantages[:, 0] > 0).float()
        neg = (s.advantages[:, 0] <= 0).float()
        avg_logp = (logp_per_token * mask).sum(-1) / mask.sum(-1)
        s.metrics = {
            "pos_logp": ((avg_logp * pos).sum() / pos.sum().clamp(min=1)).item(),
            "neg_logp": ((avg_logp * neg).sum() / neg.sum().clamp(min=1)).item(),
        }

    s.optimizer.zero_grad()
    loss.backward()
    s.metrics["grad_norm"] = torch.nn.utils.clip_grad_norm_(s.model.parameters(), 1.0).item()
    s.optimizer.step()
    return loss


if __name__ == "__main__":
    print("loss", run().item())
