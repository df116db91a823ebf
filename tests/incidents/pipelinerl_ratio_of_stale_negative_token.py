"""PipelineRL's `rl_step` (formerly TapeAgents): the ratio of a token that the actor sampled almost against its own policy.

In-flight weight updates: one token was sampled by weights that gave it exp(-104), the trainer gives it a usual probability.
new - old is above 89, exp is inf, and the advantage of the rollout is negative, so min(surr1, surr2) takes the -inf: the clip of PPO
bounds nothing there. The loss is inf and the gradients are NaN.

Source: https://github.com/ServiceNow/TapeAgents/pull/184 (Fix NaNs in RL loss), ServiceNow/PipelineRL pipelinerl/finetune/rl/__init__.py.
Heals: clamp of the log ratio before exp, or leaving the stale token out before exp. Does not: gradient clipping, the surrogate's own clamp, masking (the token counts).
"""

from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import nn

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("exp_overflow",),
    op=("exp",),
    index=(2, 3),
    masked=False,
    role=("ratio", "is_weight"),
    fix=("clamp_exponent", "drop_invalid_sample", "clamp_input"),
    variable=("ratio_new_old",),
    line=("ratio_new_old = torch.exp(log_ratio_new_old)",),
)

CONFIG = SimpleNamespace(epsilon=0.2, kl_coef=0.05, entropy_bonus=0.0, batch_size=3)


def rl_step(model, batch, config):
    logits = model(batch["states"])[:, :-1]
    labels = batch["labels"][:, 1:]
    masks = labels != -100
    new_logprobs = F.log_softmax(logits, dim=-1).gather(2, labels.clamp(min=0).unsqueeze(2)).squeeze(2)
    new_logprobs = torch.where(masks, new_logprobs, torch.zeros_like(new_logprobs))
    old_logprobs = batch["old_logprobs"][:, 1:]
    ref_logprobs = batch["ref_logprobs"][:, 1:]
    log_p_weights = batch["advantages"][:, 1:] / batch["group_tokens"][:, 1:]

    log_ratio_new_old = new_logprobs - old_logprobs
    ratio_new_old = torch.exp(log_ratio_new_old)
    log_ratio_ref_new = ref_logprobs - new_logprobs
    approx_kl = torch.exp(log_ratio_ref_new) - log_ratio_ref_new - 1
    surr1 = ratio_new_old * log_p_weights
    surr2 = torch.clamp(ratio_new_old, 1 - config.epsilon, 1 + config.epsilon) * log_p_weights
    policy_loss = torch.min(surr1, surr2)
    loss = policy_loss - config.kl_coef * approx_kl
    return -torch.where(masks, loss, torch.zeros_like(loss)).sum() / config.batch_size


def build():
    torch.manual_seed(3)
    states, vocab = 10, 16
    model = nn.Sequential(nn.Linear(states, 24), nn.Tanh(), nn.Linear(24, vocab))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    x = torch.randn(3, 7, states)
    labels = torch.randint(0, vocab, (3, 7))
    labels[:, :2] = -100
    labels[0, 6:] = -100
    with torch.no_grad():
        logp = F.log_softmax(model(x)[:, :-1], -1).gather(2, labels[:, 1:].clamp(min=0).unsqueeze(2)).squeeze(2)
        logp = F.pad(logp, (1, 0)) * (labels != -100)
    old = logp + 0.02 * torch.randn_like(logp) * (labels != -100)
    old[2, 4] = -104.0  # sampled one weight version ago
    batch = {
        "states": x,
        "labels": labels,
        "old_logprobs": old,
        "ref_logprobs": logp.clone(),
        "advantages": torch.tensor([0.9, 0.4, -1.3]).unsqueeze(1).expand(3, 7),
        "group_tokens": torch.full((3, 7), 14.0),
    }
    return SimpleNamespace(model=model, optimizer=optimizer, batch=batch)


def run(s=None):
    s = s or build()
    for _ in range(2):
        s.optimizer.zero_grad()
        loss = rl_step(s.model, s.batch, CONFIG)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(s.model.parameters(), 0.3)
        s.optimizer.step()
    return loss.item()


if __name__ == "__main__":
    print(run())
