"""FlowRL - trajectory balance: (log Z + mean log pi - beta * reward - mean log pi_ref)^2. The reference log-probs come from an engine
that samples with top-k and reports -inf for one response token outside of its set: the mean of that answer is -inf, its residual +inf,
and the squared loss and every gradient are non-finite.

https://github.com/Xuekai-Zhu/FlowRL (compute_flowrl_objective in verl_FlowRL/verl/workers/actor/dp_actor.py)
Heals: drop or reject the answer whose reference log-prob is not finite, or floor the reference log-probs. Does not: the clamp of the
importance weight (it is there), gradient clipping (the norm is NaN).
"""

from types import SimpleNamespace

import torch
import torch.nn as nn

from expected import Expected

EXPECTED = Expected(
    phase=("input",),
    cause=("bad_input",),
    op=("mul", "input", "sum"),
    index=(1, 3),
    masked=False,
    role=("ref_log_probs",),
    fix=("drop_invalid_sample", "reject_input", "clamp_input", "mask_before_op", "fix_upstream"),
    variable=("ref_log_prob",),
    line=(
        "return (values * mask).sum(axis=axis)",
        "avg_ref_log_prob = masked_mean(ref_log_prob, response_mask, axis=1)",
    ),
)


def masked_sum(values, mask, axis=None):
    return (values * mask).sum(axis=axis)


def masked_mean(values, mask, axis=None):
    return masked_sum(values, mask, axis=axis) / (mask.sum(axis=axis) + 1e-8)


class Actor(nn.Module):
    def __init__(self, vocab=20, dim=12):
        super().__init__()
        self.embed_tokens = nn.Embedding(vocab, dim)
        self.mlp = nn.Linear(dim, dim)
        self.lm_head = nn.Linear(dim, vocab)
        self.proj_z = nn.Sequential(nn.Linear(dim, dim), nn.GELU(), nn.LayerNorm(dim), nn.Linear(dim, 1))

    def forward(self, input_ids, prompt_length):
        hidden = self.embed_tokens(input_ids)
        hidden = hidden + torch.tanh(self.mlp(hidden))
        logits = self.lm_head(hidden[:, prompt_length - 1 : -1])
        log_prob = logits.log_softmax(-1).gather(-1, input_ids[:, prompt_length:].unsqueeze(-1)).squeeze(-1)
        log_z = self.proj_z(hidden[:, :prompt_length].mean(dim=1))
        return log_prob, log_z


def compute_flowrl_objective(log_prob, ref_log_prob, old_log_prob, log_z, reward, response_mask, beta=15.0, max_weight=10.0):
    log_z = log_z.squeeze(-1)
    avg_log_prob = masked_mean(log_prob, response_mask, axis=1)
    avg_ref_log_prob = masked_mean(ref_log_prob, response_mask, axis=1)
    seq_log_reward = masked_mean(reward, response_mask, axis=1)
    delta = log_z + avg_log_prob - beta * seq_log_reward - avg_ref_log_prob
    log_w = masked_sum(log_prob - old_log_prob, response_mask, axis=1)
    importance_weight = torch.clamp(torch.exp(log_w).detach(), max=max_weight)
    return torch.mean(importance_weight * (delta**2))


def build():
    torch.manual_seed(13)
    actor = Actor()
    prompt_length = 4
    input_ids = torch.randint(0, 20, (4, 10))
    response_mask = torch.ones(4, 6)
    response_mask[2, 4:] = 0
    rewards = torch.tensor([1.0, -1.0, 1.0, -1.0])
    with torch.no_grad():
        old_log_prob, _ = actor(input_ids, prompt_length)
        ref_log_prob = old_log_prob + 0.1 * torch.randn_like(old_log_prob)
        ref_log_prob[1, 3] = float("-inf")  # not in the top-k of the reference engine
    batch = dict(old_log_prob=old_log_prob, ref_log_prob=ref_log_prob, reward=rewards[:, None].expand(4, 6), response_mask=response_mask)
    optimizer = torch.optim.AdamW(actor.parameters(), lr=1e-6)
    return SimpleNamespace(model=actor, optimizer=optimizer, input_ids=input_ids, prompt_length=prompt_length, batch=batch)


def run(s=None):
    s = s or build()
    log_prob, log_z = s.model(s.input_ids, s.prompt_length)
    loss = compute_flowrl_objective(log_prob=log_prob, log_z=log_z, **s.batch)
    s.optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(s.model.parameters(), 1.0)
    s.optimizer.step()
    return loss


if __name__ == "__main__":
    run()
