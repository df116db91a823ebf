"""GSPO: one length-normalised ratio per response, several epochs on stale log-probs, one response with a single token."""

from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import nn

HEALTHY = "a response of one token and a length-normalised ratio that leaves the clip range in the later epochs"


def logprobs(net, tokens):
    return -F.cross_entropy(net(tokens[:, :-1]).transpose(1, 2), tokens[:, 1:], reduction="none")


def build():
    torch.manual_seed(102)
    net = nn.Sequential(nn.Embedding(20, 16), nn.Tanh(), nn.Linear(16, 20))
    tokens = torch.randint(0, 20, (6, 11))
    lengths = torch.tensor([10, 1, 7, 4, 10, 2])
    response_mask = torch.arange(10)[None, :] < lengths[:, None]
    return SimpleNamespace(net=net, opt=torch.optim.Adam(net.parameters(), lr=4e-3), tokens=tokens, response_mask=response_mask)


def run(s=None):
    s = s or build()
    scores = torch.tensor([0.1, 0.9, 0.4, 0.4, 0.7, 0.2]).view(2, 3)
    advantages = ((scores - scores.mean(1, keepdim=True)) / (scores.std(1, keepdim=True) + 1e-6)).flatten()
    with torch.no_grad():
        old = logprobs(s.net, s.tokens)
    for _epoch in range(5):
        new = logprobs(s.net, s.tokens)
        n_tok = s.response_mask.sum(-1)
        log_seq_ratio = ((new - old) * s.response_mask).sum(-1) / n_tok
        seq_ratio = log_seq_ratio.exp()
        surrogate = torch.min(seq_ratio * advantages, seq_ratio.clamp(1 - 0.03, 1 + 0.04) * advantages)
        loss = -surrogate.mean()
        s.opt.zero_grad(set_to_none=True)
        loss.backward()
        s.opt.step()
    return loss
