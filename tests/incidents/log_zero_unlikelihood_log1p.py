"""The unlikelihood penalty is log1p(-p) on repeated tokens; the model repeats one with probability exactly 1.0, so the argument is -1."""

from types import SimpleNamespace

import torch
import torch.nn as nn

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("log_zero",),
    op=("log1p",),
    index=(1, 3),
    masked=False,
    role=("loss", "log_probs"),
    fix=("stable_function", "clamp_input"),
    variable=(None,),
    line=("penalty = -torch.log1p(-torch.exp(logp))",),
)


class Repeater(nn.Module):
    def __init__(self, vocab=15):
        super().__init__()
        self.lookup = nn.Embedding(vocab, vocab)

    def forward(self, ids):
        return self.lookup(ids)


def unlikelihood(logp, repeated):
    penalty = -torch.log1p(-torch.exp(logp))
    return penalty[repeated].mean()


def build():
    torch.manual_seed(404)
    model = Repeater()
    ids = torch.tensor([[3, 8, 2, 8, 9, 1], [7, 4, 11, 6, 6, 2]])
    with torch.no_grad():
        model.lookup.weight[6, 6] = 42.0
    repeated = torch.zeros(2, 5, dtype=torch.bool)
    repeated[0, 2] = repeated[1, 3] = True
    return SimpleNamespace(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), batch=dict(ids=ids, repeated=repeated))


def run(s=None):
    s = s or build()
    ids, repeated = s.batch["ids"], s.batch["repeated"]
    logp = -nn.functional.cross_entropy(s.model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten(), reduction="none").view(2, 5)
    loss = -logp[~repeated].mean() + 0.5 * unlikelihood(logp, repeated)
    s.optimizer.zero_grad()
    loss.backward()
    s.optimizer.step()
    return loss
