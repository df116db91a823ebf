"""AReaL `compute_prox_logp_approximations`: -1 / 0 in the branch that is not taken, on versions, which have no gradient.

The proximal log-prob is interpolated between behaviour and current policy with alpha = (v_prox - v_behave) / (v_theta - v_behave). Tokens that
the current version generated have a difference of 0 and alpha would be -inf; `torch.where` puts 0 there. The quotient is made of version
numbers, so no gradient passes through it, and the guard really guards: prompt tokens have version -1 and are left alone as well.
Source: https://github.com/areal-project/AReaL/pull/600, areal/trainer/ppo/actor.py `compute_prox_logp_approximations`.
"""

from types import SimpleNamespace

import torch
import torch.nn as nn


def compute_prox_logp_approximation(old_logp, logprobs, versions, current_version):
    v_proximal = current_version - 1
    v_behave = versions.float()
    v_theta = float(current_version)
    generated_tokens_mask = versions >= 0
    version_diff = v_theta - v_behave
    version_gap = v_proximal - v_behave
    alpha = torch.where((version_diff > 0) & generated_tokens_mask, version_gap / version_diff, torch.zeros_like(v_behave))
    alpha = torch.clamp(alpha, 0.0, 1.0)
    return old_logp + alpha * (logprobs - old_logp)


def ppo_actor_loss_fn(logprobs, proximal_logprobs, old_logprobs, advantages, eps_clip, loss_mask, behave_imp_weight_cap):
    loss_mask_count = loss_mask.count_nonzero() or 1
    ratio = torch.where(loss_mask, torch.exp(logprobs - proximal_logprobs), 0)
    clipped_ratio = torch.clamp(ratio, 1.0 - eps_clip, 1.0 + eps_clip)
    pg_loss = torch.max(-advantages * ratio, -advantages * clipped_ratio)
    behave_imp_weight = (proximal_logprobs - old_logprobs).exp()
    behave_mask = (behave_imp_weight <= behave_imp_weight_cap).logical_and(loss_mask)
    behave_imp_weight = torch.where(behave_mask, behave_imp_weight, 0.0)
    pg_loss = pg_loss * behave_imp_weight
    return torch.where(loss_mask, pg_loss, 0).sum() / loss_mask_count


class Actor(nn.Module):
    def __init__(self, vocab=16, dim=12):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.lm_head = nn.Linear(dim, vocab, bias=False)

    def forward(self, ids):
        return self.lm_head(self.embed(ids))


def build():
    torch.manual_seed(3004)
    actor = Actor()
    input_ids = torch.randint(0, 16, (3, 9))
    versions = torch.tensor([[-1, -1, 4, 4, 5, 5, 7, 7], [-1, -1, -1, 7, 7, 7, 7, 7], [-1, -1, 6, 6, 6, 6, 7, 7]])
    loss_mask = versions >= 0
    with torch.no_grad():
        old_logp = actor(input_ids[:, :-1]).log_softmax(-1).gather(-1, input_ids[:, 1:, None]).squeeze(-1)
        old_logp = old_logp + 0.1 * torch.randn(3, 8)
    advantages = torch.tensor([0.9, -1.1, 0.2])[:, None].expand(3, 8)
    optimizer = torch.optim.AdamW(actor.parameters(), lr=1e-5)
    return SimpleNamespace(
        model=actor,
        optimizer=optimizer,
        input_ids=input_ids,
        versions=versions,
        loss_mask=loss_mask,
        old_logp=old_logp,
        advantages=advantages,
        current_version=7,
        eps_clip=0.2,
        behave_imp_weight_cap=5.0,
    )


def run(s=None):
    s = s or build()
    logprobs = s.model(s.input_ids[:, :-1]).log_softmax(-1).gather(-1, s.input_ids[:, 1:, None]).squeeze(-1)
    prox_logp = compute_prox_logp_approximation(s.old_logp, logprobs.detach(), s.versions, s.current_version)
    loss = ppo_actor_loss_fn(logprobs, prox_logp, s.old_logp, s.advantages, s.eps_clip, s.loss_mask, s.behave_imp_weight_cap)
    s.optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(s.model.parameters(), 1.0)
    s.optimizer.step()
    return loss
