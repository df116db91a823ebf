"""The KL coefficient is still 0 in the first warm-up step, but the k3 KL is infinite on one token, and 0.0 * inf makes the loss NaN."""

from types import SimpleNamespace

import torch
import torch.nn as nn

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("inf_times_zero_coef", "exp_overflow"),
    op=("exp",),
    index=(2, 3),
    masked=False,
    role=("kl", "ratio"),
    fix=("skip_disabled_term", "clamp_exponent"),
    variable=(None,),
    line=("return torch.exp(d) - d - 1.0",),
)


class KLController:
    def __init__(self, target, warmup):
        self.target, self.warmup, self.step = target, warmup, 0

    @property
    def value(self):
        return self.target * min(1.0, self.step / self.warmup)


class Actor(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(20, 6)
        self.project = nn.Linear(6, 20)

    def logps(self, x):
        logits = self.project(self.embedding(x[:, :-1]))
        return -nn.functional.cross_entropy(logits.transpose(1, 2), x[:, 1:], reduction="none")


def kl_penalty(lp, ref_lp):
    d = ref_lp - lp
    return torch.exp(d) - d - 1.0


def build():
    torch.manual_seed(66)
    model = Actor()
    x = torch.randint(1, 20, (3, 6))
    x[2, 4] = 0
    with torch.no_grad():
        model.project.bias[0] -= 130.0
        ref_lp = model.logps(x).clamp(min=-9.0)
    mask = torch.ones(3, 5)
    mask[0, 4] = 0
    batch = dict(x=x, ref_lp=ref_lp, mask=mask, adv=torch.tensor([[0.4], [-1.0], [0.6]]))
    return SimpleNamespace(model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-5), batch=batch, kl=KLController(0.05, 20))


def run(s=None):
    s = s or build()
    b = s.batch
    lp = s.model.logps(b["x"])
    pg = -((lp - lp.detach()).exp() * b["adv"] * b["mask"]).sum() / b["mask"].sum()
    penalty = (kl_penalty(lp, b["ref_lp"]) * b["mask"]).sum() / b["mask"].sum()
    loss = pg + s.kl.value * penalty
    loss.backward()
    s.optimizer.step()
    s.kl.step += 1
    return loss
