"""Tokens are pooled into classes by logsumexp over an additive -inf mask; a class without tokens gives exp(-inf + inf) in backward."""

from types import SimpleNamespace

import torch
import torch.nn as nn

from expected import Expected

EXPECTED = Expected(
    phase=("backward", "forward"),
    cause=("inf_minus_inf", "where_grad_trap"),
    op=("logsumexp",),
    index=(2, 1),
    masked=None,
    role=("log_probs", "logits"),
    fix=("finite_mask_fill",),
    variable=("pooled",),
    line=("pooled = torch.logsumexp(log_p[:, None, :] + members, dim=-1)",),
)


class Verifier(nn.Module):
    def __init__(self, vocab=11, dim=6):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.head = nn.Linear(dim, vocab)

    def forward(self, ids):
        return self.head(self.embed(ids)).log_softmax(-1)


def pool(log_p, members):
    pooled = torch.logsumexp(log_p[:, None, :] + members, dim=-1)
    return pooled - pooled.logsumexp(-1, keepdim=True)


def build():
    torch.manual_seed(9)
    model = Verifier()
    members = torch.full((4, 3, 11), -torch.inf)
    members[:, 0, :5] = 0.0
    members[:, 1, 5:8] = 0.0
    members[:, 2, 8:] = 0.0
    members[2, 1] = -torch.inf  # this prompt knows no second class
    return SimpleNamespace(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        batch=(torch.tensor([1, 4, 7, 10]), members, torch.tensor([0, 1, 0, 2])),
    )


def run(s=None):
    s = s or build()
    ids, members, wanted = s.batch
    class_log_p = pool(s.model(ids), members)
    loss = -class_log_p[torch.arange(4), wanted].mean()
    s.optimizer.zero_grad()
    loss.backward()
    s.optimizer.step()
    return loss
