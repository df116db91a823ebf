"""A length bonus is switched off with weight 0.0, yet its 1/remaining term divides by 0 for a response that used its
whole budget: 0.0 * inf."""

from types import SimpleNamespace

import torch
import torch.nn as nn

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("inf_times_zero_coef", "zero_denominator"),
    op=("div",),
    index=(3,),
    masked=False,
    role=("rewards",),
    fix=("skip_disabled_term", "clamp_denominator"),
    variable=("pressure",),
    line=("pressure = used / remaining",),
)


class Speaker(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.EmbeddingBag(15, 8, mode="mean")
        self.head = nn.Linear(8, 6)

    def forward(self, prompt):
        return self.head(self.emb(prompt))


def shaped_reward(correct, used, budget, weights):
    remaining = (budget - used).float()
    pressure = used / remaining
    terms = {"correct": correct, "length": -pressure}
    return sum(weights[k] * v for k, v in terms.items())


def build():
    torch.manual_seed(27)
    model = Speaker()
    batch = dict(
        prompt=torch.randint(0, 15, (5, 4)),
        choice=torch.randint(0, 6, (5,)),
        correct=torch.tensor([1.0, 0.0, 1.0, 0.0, 1.0]),
        used=torch.tensor([12, 31, 20, 64, 47]),
        budget=64,
        weights={"correct": 1.0, "length": 0.0},
    )
    return SimpleNamespace(model=model, optimizer=torch.optim.Adagrad(model.parameters(), lr=1e-2), batch=batch)


def run(s=None):
    s = s or build()
    b = s.batch
    reward = shaped_reward(b["correct"], b["used"], b["budget"], b["weights"])
    advantage = reward - reward.mean()
    lp = s.model(b["prompt"]).log_softmax(-1)[torch.arange(5), b["choice"]]
    loss = -(advantage * lp).mean()
    loss.backward()
    s.optimizer.step()
    return loss
