"""A soft length penalty picks exp(a) only for a <= 0, but torch.where differentiates both branches and exp of the rejected one is inf.
https://github.com/pytorch/pytorch/issues/68425
"""

from types import SimpleNamespace

import torch
import torch.nn as nn

from expected import Expected

EXPECTED = Expected(
    phase=("backward",),
    cause=("where_grad_trap", "exp_overflow"),
    op=("exp",),
    index=(3,),
    masked=True,
    role=("loss", "rewards", "hidden"),
    fix=("clamp_exponent", "mask_before_op", "where_on_detached"),
    variable=(None,),
    line=("return torch.where(excess <= 0, torch.exp(excess), 1 + excess)",),
)


class LengthRegulariser(nn.Module):
    def __init__(self, dim=6):
        super().__init__()
        self.predictor = nn.Linear(dim, 1)

    def forward(self, features, target_len):
        excess = self.predictor(features).squeeze(-1) - target_len
        return torch.where(excess <= 0, torch.exp(excess), 1 + excess)


class PolicyWithLength(nn.Module):
    def __init__(self, vocab=13, dim=6):
        super().__init__()
        self.emb = nn.Embedding(vocab, dim)
        self.head = nn.Linear(dim, vocab)
        self.length = LengthRegulariser(dim)


def build():
    torch.manual_seed(68425)
    model = PolicyWithLength()
    with torch.no_grad():
        model.length.predictor.bias.fill_(128.0)
    ids = torch.randint(0, 13, (5, 8))
    target_len = torch.tensor([130.0, 127.0, 256.0, 20.0, 129.5])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    return SimpleNamespace(model=model, optimizer=optimizer, batch=(ids, target_len, torch.randn(5)))


def run(s=None):
    s = s or build()
    ids, target_len, advantage = s.batch
    hidden = s.model.emb(ids)
    logp = s.model.head(hidden[:, :-1]).log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1).mean(1)
    penalty = s.model.length(hidden.mean(1), target_len)
    loss = -(advantage * logp).mean() + 1e-3 * penalty.mean()
    s.optimizer.zero_grad()
    loss.backward()
    s.optimizer.step()
    return loss
