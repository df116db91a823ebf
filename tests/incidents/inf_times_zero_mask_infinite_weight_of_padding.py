"""The sampler hands over correction weights; at padding it divides by a probability of 0, and the mask multiplies that inf by 0."""

from types import SimpleNamespace

import torch
import torch.nn as nn

from expected import Expected

EXPECTED = Expected(
    phase=("input",),
    cause=("inf_times_zero_mask", "bad_input"),
    op=("input",),
    index=(1, 4),
    masked=True,
    role=("is_weight", "ratio"),
    fix=("mask_before_op",),
    variable=("tis_weights",),
    line=("per_token = -tis_weights * advantages[:, None] * log_probs",),
)


class Chat(nn.Module):
    def __init__(self, vocab=13, dim=6):
        super().__init__()
        self.wte = nn.Embedding(vocab, dim)
        self.out = nn.Linear(dim, vocab)

    def forward(self, ids):
        return self.out(torch.tanh(self.wte(ids)))


def corrected_loss(log_probs, advantages, tis_weights, loss_mask):
    per_token = -tis_weights * advantages[:, None] * log_probs
    return (per_token * loss_mask).sum(1).mean() / loss_mask.sum(1).max()


def build():
    torch.manual_seed(51)
    weights = 1 + 0.1 * torch.randn(3, 6)
    mask = torch.ones(3, 6)
    mask[1, 4:] = 0
    weights[1, 4] = torch.inf
    model = Chat()
    batch = {"ids": torch.randint(0, 13, (3, 7)), "weights": weights, "mask": mask, "advantages": torch.tensor([0.3, -0.8, 0.5])}
    return SimpleNamespace(model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-4), batch=batch)


def run(s=None):
    s = s or build()
    ids = s.batch["ids"]
    log_probs = s.model(ids[:, :-1]).log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)
    loss = corrected_loss(log_probs, s.batch["advantages"], tis_weights=s.batch["weights"], loss_mask=s.batch["mask"])
    loss.backward()
    s.optimizer.step()
    return loss
