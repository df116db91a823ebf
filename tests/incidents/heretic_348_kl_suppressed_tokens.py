"""Suppressed tokens have log-probability -inf in both models, and the KL penalty subtracts the two infinities.
https://github.com/p-e-w/heretic/pull/348
"""

from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("inf_minus_inf", "plogp_zero"),
    op=("sub",),
    index=(0, 6),
    masked=False,
    role=("kl", "log_ratio"),
    fix=("finite_mask_fill", "mask_before_op", "stable_function"),
    variable=(None,),
    line=('kl_divergence = F.kl_div(base_logprobs, logprobs, reduction="batchmean", log_target=True)',),
)


class LM(nn.Module):
    def __init__(self, vocab=14, dim=8):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.block = nn.Linear(dim, dim)
        self.lm_head = nn.Linear(dim, vocab, bias=False)

    def forward(self, ids):
        x = self.embed(ids)
        return self.lm_head(x + F.silu(self.block(x)))


def suppress_tokens(scores, suppressed):
    scores = scores.clone()
    scores[:, suppressed] = -float("inf")
    return scores


def get_logprobs(model, prompts, suppressed):
    first_token_scores = suppress_tokens(model(prompts)[:, -1], suppressed)
    return F.log_softmax(first_token_scores, dim=-1)


def build():
    torch.manual_seed(348)
    base, edited = LM(), LM()
    edited.load_state_dict(base.state_dict())
    with torch.no_grad():
        edited.block.weight.add_(0.02 * torch.randn(8, 8))
    prompts = torch.randint(0, 14, (4, 5))
    batch = {"prompts": prompts, "refusal_token": 3, "suppressed": [6, 9]}
    return SimpleNamespace(model=edited, base=base, optimizer=torch.optim.Adam(edited.block.parameters(), lr=1e-3), batch=batch)


def run(s=None):
    s = s or build()
    b = s.batch
    with torch.no_grad():
        base_logprobs = get_logprobs(s.base, b["prompts"], b["suppressed"])
    logprobs = get_logprobs(s.model, b["prompts"], b["suppressed"])
    kl_divergence = F.kl_div(base_logprobs, logprobs, reduction="batchmean", log_target=True)
    refusal = logprobs[:, b["refusal_token"]].exp().mean()
    loss = refusal + 0.5 * kl_divergence
    s.optimizer.zero_grad()
    loss.backward()
    s.optimizer.step()
    return loss
