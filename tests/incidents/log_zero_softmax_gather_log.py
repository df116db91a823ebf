"""Token log-probs are taken as log(softmax(logits)); the sampled token lies 120 nats below the best one, so its
probability underflows to 0."""

from types import SimpleNamespace

import torch
import torch.nn as nn

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("log_zero",),
    op=("log",),
    index=(1, 2),
    masked=False,
    role=("log_probs",),
    fix=("stable_function", "clamp_input"),
    variable=("logp",),
    line=("logp = chosen.log()",),
)


class Net(nn.Module):
    def __init__(self, n=19):
        super().__init__()
        self.emb = nn.Embedding(n, 8)
        self.head = nn.Linear(8, n)

    def forward(self, ids):
        return self.head(self.emb(ids))


def reinforce(logits, tokens, reward, baseline, mask):
    probs = torch.softmax(logits, dim=-1)
    chosen = probs.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
    logp = chosen.log()
    adv = (reward - baseline).unsqueeze(1)
    return -(logp * adv)[mask].sum() / mask.sum()


def build():
    torch.manual_seed(16)
    model = Net()
    ids = torch.randint(1, 19, (3, 6))
    ids[ids == 5] = 2
    ids[1, 3] = 5  # sampled at a high temperature
    with torch.no_grad():
        model.head.bias[5] = -120.0
    mask = torch.ones(3, 5, dtype=torch.bool)
    mask[:, 0] = False
    batch = dict(ids=ids, mask=mask, reward=torch.tensor([1.0, 0.0, 1.0]))
    return SimpleNamespace(model=model, optimizer=torch.optim.RMSprop(model.parameters(), lr=1e-4), batch=batch)


def run(s=None):
    s = s or build()
    ids = s.batch["ids"]
    loss = reinforce(s.model(ids[:, :-1]), ids[:, 1:], reward=s.batch["reward"], baseline=0.6, mask=s.batch["mask"])
    loss.backward()
    s.optimizer.step()
    return loss
