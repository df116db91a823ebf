"""Training log-probs are renormalised over the nucleus of top-p sampling; the sampled tokens are always inside it."""

from types import SimpleNamespace

import torch
from torch import nn

HEALTHY = "log_softmax over rows that are mostly -inf, from which only kept tokens are gathered"


def top_p_filter(logits, top_p):
    ordered, index = torch.sort(logits, descending=True, dim=-1)
    cumulative = ordered.softmax(-1).cumsum(-1)
    drop = cumulative - ordered.softmax(-1) >= top_p
    remove = torch.zeros_like(drop).scatter(-1, index, drop)
    return logits.masked_fill(remove, float("-inf"))


def build():
    torch.manual_seed(208)
    net = nn.Sequential(nn.Embedding(15, 10), nn.Linear(10, 15))
    prompt = torch.randint(0, 15, (4, 6))
    with torch.no_grad():
        filtered = top_p_filter(net(prompt) * 4, 0.6)
        nxt = torch.multinomial(filtered.softmax(-1).flatten(0, 1), 1).view(4, 6)
    return SimpleNamespace(net=net, opt=torch.optim.SGD(net.parameters(), lr=1e-3), prompt=prompt, nxt=nxt, keep=filtered > float("-inf"))


def run(s=None):
    s = s or build()
    adv = torch.tensor([0.6, -0.6, 1.1, -1.1])
    for _ in range(3):
        logits = (s.net(s.prompt) * 4).masked_fill(~s.keep, float("-inf"))
        logp = logits.log_softmax(-1).gather(-1, s.nxt[..., None])[..., 0]
        loss = -((logp - logp.detach()).exp() * adv[:, None]).mean()
        s.opt.zero_grad()
        loss.backward()
        s.opt.step()
    return loss
