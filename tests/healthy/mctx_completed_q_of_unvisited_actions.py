"""Looks broken, is healthy. Gumbel MuZero's improved policy needs Q values of all actions; children that the search never visited have
value_sum / visits = 0 / 0 = NaN. They are completed with the mixed value by where on the visit counts, illegal actions get -inf logits, and all
of this is a target built without gradient. The cross entropy masks the 0 * -inf terms before it multiplies.

Source: _complete_qvalues / qtransform_completed_by_mix_value of https://github.com/google-deepmind/mctx/blob/main/mctx/_src/qtransforms.py
"""

from types import SimpleNamespace

import torch
import torch.nn as nn


class SearchTree:
    """Statistics of the root's children after the simulations."""

    def __init__(self, visits, value_sum, raw_value, prior_logits, legal):
        self.visits, self.value_sum, self.raw_value = visits, value_sum, raw_value
        self.prior_logits, self.legal = prior_logits, legal

    @property
    def qvalues(self):
        return self.value_sum / self.visits


def complete_qvalues(tree):
    visited = tree.visits > 0
    prior = tree.prior_logits.softmax(-1)
    sum_probs = torch.where(visited, prior, torch.zeros_like(prior)).sum(-1, keepdim=True)
    weighted_q = torch.where(visited, prior * tree.qvalues / sum_probs, torch.zeros_like(prior)).sum(-1)
    total = tree.visits.sum(-1)
    mixed_value = (tree.raw_value + total * weighted_q) / (total + 1)
    completed = torch.where(visited, tree.qvalues, mixed_value.unsqueeze(-1))
    low, high = completed.amin(-1, keepdim=True), completed.amax(-1, keepdim=True)
    return (completed - low) / (high - low).clamp(min=1e-8)


@torch.no_grad()
def improved_policy(tree, maxvisit_init=50.0, value_scale=0.1):
    scale = (maxvisit_init + tree.visits.amax(-1, keepdim=True)) * value_scale
    logits = tree.prior_logits + scale * complete_qvalues(tree)
    return logits.masked_fill(~tree.legal, float("-inf")).softmax(-1)


class PredictionNetwork(nn.Module):
    def __init__(self, latent=12, actions=6):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(latent, 32), nn.ReLU())
        self.policy, self.value = nn.Linear(32, actions), nn.Linear(32, 1)

    def forward(self, latent):
        h = self.trunk(latent)
        return self.policy(h), self.value(h).squeeze(-1)


def build():
    torch.manual_seed(2104)
    model = PredictionNetwork()
    latents = torch.randn(10, 12)
    legal = torch.ones(10, 6, dtype=torch.bool)
    legal[3, :2] = False
    legal[7, 4] = False
    visits = torch.randint(0, 6, (10, 6)).float() * legal
    visits[5] = 0.0
    visits[5, 1] = 16.0  # the search looked at one action only
    value_sum = torch.randn(10, 6) * visits
    with torch.no_grad():
        prior_logits, raw_value = model(latents)
    tree = SearchTree(visits, value_sum, raw_value, prior_logits, legal)
    return SimpleNamespace(
        model=model, latents=latents, tree=tree, returns=torch.randn(10), optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3)
    )


def run(s=None):
    s = s or build()
    target = improved_policy(s.tree)
    logits, value = s.model(s.latents)
    log_probs = logits.masked_fill(~s.tree.legal, float("-inf")).log_softmax(-1)
    policy_loss = -(target * log_probs.masked_fill(~s.tree.legal, 0.0)).sum(-1).mean()
    loss = policy_loss + 0.25 * (value - s.returns).pow(2).mean()
    s.optimizer.zero_grad()
    loss.backward()
    s.optimizer.step()
    return loss
