"""The rollout engine reports log-probs after top-k filtering; a forced token outside the top k arrives as -inf."""

from types import SimpleNamespace

import torch
import torch.nn as nn

from expected import Expected

EXPECTED = Expected(
    phase=("input", "forward"),
    cause=("bad_input",),
    op=("input", "sub"),
    index=(16,),
    masked=False,
    role=("rollout_log_probs", "old_log_probs"),
    fix=("drop_invalid_sample", "reject_input", "mask_before_op", "clamp_input"),
    variable=("rollout_logprobs",),
    line=("log_ratio = logprobs - rollout_logprobs",),
)


def packed_logprobs(model, tokens):
    logits = model(tokens[:-1])
    return logits.log_softmax(dim=-1)[torch.arange(len(tokens) - 1), tokens[1:]]


def truncated_is_loss(logprobs, rollout_logprobs, advantages, loss_mask, cap=2.0):
    log_ratio = logprobs - rollout_logprobs
    ratio = torch.exp(log_ratio)
    with torch.no_grad():
        stale = log_ratio.abs().mean()
    per_token = -(ratio * advantages)[loss_mask]
    penalty = 0.01 * log_ratio[loss_mask].square()
    return (per_token + penalty).mean(), {"ratio_cap_hits": (ratio > cap).sum(), "mean_abs_log_ratio": stale}


def build():
    torch.manual_seed(8442)
    model = nn.Sequential(nn.Embedding(26, 10), nn.Linear(10, 10), nn.ReLU(), nn.Linear(10, 26))
    lengths = (9, 14)
    tokens = torch.randint(0, 26, (sum(lengths) + 1,))
    prompt = torch.zeros(sum(lengths), dtype=torch.bool)
    prompt[:3] = True
    prompt[lengths[0] : lengths[0] + 3] = True
    with torch.no_grad():
        rollout_logprobs = packed_logprobs(model, tokens) + 0.01 * torch.randn(sum(lengths))
    rollout_logprobs[16] = -float("inf")  # "</think>" injected by the thinking budget, not drawn from the filtered distribution
    advantages = torch.repeat_interleave(torch.tensor([-0.8, 0.8]), torch.tensor(lengths))
    batch = {"tokens": tokens, "rollout_logprobs": rollout_logprobs, "advantages": advantages, "loss_mask": ~prompt}
    return SimpleNamespace(model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=2e-6), batch=batch)


def run(s=None):
    s = s or build()
    logprobs = packed_logprobs(s.model, s.batch["tokens"])
    loss, s.metrics = truncated_is_loss(logprobs, s.batch["rollout_logprobs"], s.batch["advantages"], loss_mask=s.batch["loss_mask"])
    s.optimizer.zero_grad()
    loss.backward()
    s.optimizer.step()
    return loss
