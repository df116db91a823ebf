"""Dynamic sampling drops every group without reward variance; in this batch all groups are dropped and the mean is over nothing."""

from types import SimpleNamespace

import torch
import torch.nn as nn

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("empty_mask_mean",),
    op=("mean",),
    index=(),
    masked=None,
    role=("loss",),
    fix=("guard_empty",),
    variable=("objective",),
    line=("objective = (lp.sum(-1) * adv)[keep].mean()",),
)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Embedding(9, 5)
        self.b = nn.Linear(5, 9)

    def forward(self, x):
        return self.b(self.a(x))


def informative(rewards):
    return rewards.amax(dim=1) > rewards.amin(dim=1)


def build():
    torch.manual_seed(900)
    model = Model()
    batch = dict(seq=torch.randint(0, 9, (3, 2, 5)), rewards=torch.tensor([[1.0, 1.0], [0.0, 0.0], [1.0, 1.0]]))
    return SimpleNamespace(model=model, optimizer=torch.optim.Adam(model.parameters(), lr=1e-3), batch=batch)


def run(s=None):
    s = s or build()
    seq, rewards = s.batch["seq"], s.batch["rewards"]
    logits = s.model(seq[..., :-1])
    lp = logits.log_softmax(-1).gather(-1, seq[..., 1:].unsqueeze(-1)).squeeze(-1)
    adv = rewards - rewards.mean(1, keepdim=True)
    keep = informative(rewards)
    objective = (lp.sum(-1) * adv)[keep].mean()
    z_term = 1e-3 * logits.logsumexp(-1).pow(2).mean()
    loss = z_term - objective
    loss.backward()
    s.optimizer.step()
    return loss
