"""A run is interrupted after two steps: model, optimizer and scheduler are restored from a snapshot in memory and go on."""

import io
from types import SimpleNamespace

import torch
from torch import nn

HEALTHY = "weights and optimizer state jump back two steps in place in the middle of training, which repeats earlier losses"


def build():
    torch.manual_seed(407)
    model = nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 4))
    opt = torch.optim.AdamW(model.parameters(), lr=2e-2)
    sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, T_max=6)
    return SimpleNamespace(model=model, opt=opt, sched=sched, x=torch.randn(9, 6), a=torch.randint(0, 4, (9,)))


def save(s):
    f = io.BytesIO()
    torch.save({"model": s.model.state_dict(), "opt": s.opt.state_dict(), "sched": s.sched.state_dict()}, f)
    f.seek(0)
    return f


def run(s=None):
    s = s or build()
    adv = torch.linspace(-1, 1, 9)
    snapshot = None
    for step in range(5):
        if step == 1:
            snapshot = save(s)
        if step == 3:
            state = torch.load(snapshot)
            s.model.load_state_dict(state["model"])
            s.opt.load_state_dict(state["opt"])
            s.sched.load_state_dict(state["sched"])
        loss = (nn.functional.cross_entropy(s.model(s.x), s.a, reduction="none") * adv).sum()
        s.opt.zero_grad()
        loss.backward()
        s.opt.step()
        s.sched.step()
    return loss
