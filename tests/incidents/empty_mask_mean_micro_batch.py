"""The third micro-batch holds only prompt tokens (its answers were cut by the length limit), so sum over mask.sum() is
0/0 for that one."""

from types import SimpleNamespace

import torch
import torch.nn as nn

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("empty_mask_mean", "zero_div_zero"),
    op=("div",),
    index=(),
    masked=None,
    role=("loss",),
    fix=("clamp_denominator", "guard_empty"),
    variable=(None,),
    line=("return torch.sum(per_token * mask) / torch.sum(mask)",),
)


class Actor(nn.Module):
    def __init__(self, vocab=16, dim=8):
        super().__init__()
        self.transformer = nn.ModuleDict(dict(wte=nn.Embedding(vocab, dim), ln=nn.LayerNorm(dim)))
        self.lm_head = nn.Linear(dim, vocab, bias=False)

    def forward(self, ids):
        return self.lm_head(self.transformer["ln"](self.transformer["wte"](ids)))


class Trainer:
    def __init__(self, model, micro):
        self.model, self.micro = model, micro
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def reduce(self, per_token, mask):
        return torch.sum(per_token * mask) / torch.sum(mask)

    def micro_loss(self, ids, mask, adv):
        lp = self.model(ids[:, :-1]).log_softmax(-1).gather(2, ids[:, 1:, None]).squeeze(2)
        ratio = torch.exp(lp - lp.detach())
        return self.reduce(-ratio * adv[:, None], mask)

    def step(self, ids, mask, adv):
        self.optimizer.zero_grad()
        logged = []
        for rows in torch.arange(len(ids)).chunk(self.micro):
            loss = self.micro_loss(ids[rows], mask[rows], adv[rows]) / self.micro
            loss.backward()
            logged.append(loss.detach())
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        return torch.stack(logged).sum()


def build():
    torch.manual_seed(505)
    model = Actor()
    trainer = Trainer(model, micro=4)
    mask = torch.zeros(8, 9)
    for i, start in enumerate([3, 5, 2, 8, 9, 9, 4, 6]):
        mask[i, start:] = 1.0
    batch = dict(ids=torch.randint(0, 16, (8, 10)), mask=mask, adv=torch.randn(8))
    return SimpleNamespace(model=model, optimizer=trainer.optimizer, trainer=trainer, batch=batch)


def run(s=None):
    s = s or build()
    return s.trainer.step(**s.batch)
