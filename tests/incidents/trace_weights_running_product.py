"""Off-policy trace weights are exp of a running sum of log ratios; each token is mild, the tail of one long stale sample overflows."""

from types import SimpleNamespace

import torch
import torch.nn as nn

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("seq_ratio_overflow", "exp_overflow"),
    op=("exp",),
    index=(1, 10),
    masked=False,
    role=("ratio", "is_weight"),
    fix=("clamp_exponent",),
    variable=("trace",),
    line=("trace = drift.exp()",),
)


class Policy(nn.Module):
    def __init__(self, vocab=10, width=8):
        super().__init__()
        self.emb = nn.Embedding(vocab, width)
        self.head = nn.Linear(width, vocab)

    def forward(self, ids):
        return self.head(self.emb(ids)).log_softmax(-1)


class TraceLoss(nn.Module):
    def forward(self, logp, behaviour, delta, mask):
        drift = torch.cumsum((logp - behaviour) * mask, dim=1)
        trace = drift.exp()
        return -(trace * delta * mask).sum() / mask.sum()


def build():
    torch.manual_seed(337)
    policy = Policy()
    ids = torch.randint(0, 10, (3, 15))
    with torch.no_grad():
        behaviour = policy(ids[:, :-1]).gather(-1, ids[:, 1:, None]).squeeze(-1) + 0.1 * torch.randn(3, 14)
    behaviour[1] -= 8.5
    mask = torch.ones(3, 14)
    mask[0, 9:] = 0
    mask[2, 12:] = 0
    batch = {"ids": ids, "behaviour": behaviour, "delta": torch.randn(3, 14), "mask": mask}
    return SimpleNamespace(model=policy, optimizer=torch.optim.Adam(policy.parameters(), lr=1e-4), criterion=TraceLoss(), batch=batch)


def run(s=None):
    s = s or build()
    b = s.batch
    logp = s.model(b["ids"][:, :-1]).gather(-1, b["ids"][:, 1:, None]).squeeze(-1)
    loss = s.criterion(logp, b["behaviour"], delta=b["delta"], mask=b["mask"])
    s.optimizer.zero_grad()
    loss.backward()
    s.optimizer.step()
    return loss
