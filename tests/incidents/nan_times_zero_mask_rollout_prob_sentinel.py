"""Prompt positions of the rollout probabilities hold the sentinel -1, so their log is NaN, and the response mask only
multiplies the NaN by 0."""

from types import SimpleNamespace

import torch
import torch.nn as nn

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("nan_times_zero_mask",),
    op=("log",),
    index=(0, 0),
    masked=True,
    role=("rollout_log_probs", "old_log_probs", "log_probs"),
    fix=("mask_before_op", "clamp_input"),
    variable=("sampler_lp",),
    line=("sampler_lp = sampler_prob.log()",),
)


class Causal(nn.Module):
    def __init__(self, v=16, d=8):
        super().__init__()
        self.e = nn.Embedding(v, d)
        self.o = nn.Linear(d, v)

    def forward(self, x):
        return self.o(self.e(x).cumsum(1) / torch.arange(1, x.shape[1] + 1)[None, :, None])


def masked_mean(x, m):
    return torch.sum(x * m) / torch.sum(m)


def policy_loss(lp, sampler_prob, adv, response_mask):
    sampler_lp = sampler_prob.log()
    r = torch.exp(lp - sampler_lp)
    surr = torch.min(r * adv, r.clamp(0.8, 1.2) * adv)
    return -masked_mean(surr, response_mask)


def build():
    torch.manual_seed(301)
    model = Causal()
    ids = torch.randint(0, 16, (2, 9))
    response_mask = torch.ones(2, 8)
    response_mask[0, :3] = 0
    response_mask[1, :4] = 0
    with torch.no_grad():
        prob = model(ids[:, :-1]).softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)
    sampler_prob = torch.where(response_mask.bool(), prob * 0.98, -torch.ones(()))
    batch = dict(ids=ids, response_mask=response_mask, sampler_prob=sampler_prob, adv=torch.tensor([[0.7], [-0.7]]))
    return SimpleNamespace(model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-4), batch=batch)


def run(s=None):
    s = s or build()
    ids = s.batch["ids"]
    lp = s.model(ids[:, :-1]).log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)
    loss = policy_loss(lp, s.batch["sampler_prob"], s.batch["adv"], s.batch["response_mask"])
    s.optimizer.zero_grad()
    loss.backward()
    s.optimizer.step()
    return loss
