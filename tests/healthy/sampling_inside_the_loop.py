"""Each iteration first samples completions with temperature and top-k (-inf elsewhere), then does a policy-gradient step on them."""

from types import SimpleNamespace

import torch
from torch import nn

HEALTHY = "sampling divides by a small temperature and fills most logits with -inf, all of it under no_grad"


class LM(nn.Module):
    def __init__(self, v=18, d=12):
        super().__init__()
        self.e, self.g, self.o = nn.Embedding(v, d), nn.GRU(d, d, batch_first=True), nn.Linear(d, v)

    def forward(self, ids):
        return self.o(self.g(self.e(ids))[0])


@torch.inference_mode()
def sample(model, prompt, steps, temperature, k, generator):
    ids = prompt
    for _ in range(steps):
        logits = model(ids)[:, -1] / temperature
        kth = logits.topk(k).values[:, -1:]
        logits[logits < kth] = -float("inf")
        ids = torch.cat([ids, torch.multinomial(logits.softmax(-1), 1, generator=generator)], dim=1)
    return ids


def build():
    torch.manual_seed(301)
    model = LM()
    return SimpleNamespace(model=model, opt=torch.optim.AdamW(model.parameters(), lr=2e-3), prompt=torch.randint(0, 18, (4, 2)))


def run(s=None):
    s = s or build()
    gen = torch.Generator().manual_seed(11)
    for _ in range(3):
        ids = sample(s.model, s.prompt, 5, 0.05, 4, gen).clone()
        reward = (ids[:, 2:] % 2 == 0).float().mean(1)
        adv = (reward - reward.mean()) / (reward.std() + 1e-4)
        lp = s.model(ids[:, :-1]).log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)[:, 1:]
        loss = -((lp - lp.detach()).exp() * adv[:, None]).mean()
        s.opt.zero_grad()
        loss.backward()
        s.opt.step()
    return loss
