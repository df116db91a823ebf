"""verl's GMPO (geo_mean) loss with rollout correction: the token weights are joined per sequence as exp(mean(log(w + 1e-10))). The weights
are 0 on padding and were stored in half, where 1e-10 is 0: log(0) is -inf on every padded token, and -inf * 0 of the response mask is NaN.

https://github.com/volcengine/verl/blob/main/verl/trainer/ppo/core_algos.py (compute_policy_loss_geo_mean, seq_is_weights)

Heals: fp32 weights, an epsilon that half can hold (1e-7), or 1 on padding before the log. Does not: 1e-8 instead of 1e-10 (also 0 in half),
or masking the token losses once more afterwards, they are finite.
"""

from types import SimpleNamespace

import torch
import torch.nn as nn

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("eps_underflow", "log_zero", "inf_times_zero_mask"),
    op=("log",),
    index=(0, 5),
    masked=True,
    role=("is_weight",),
    fix=("representable_eps", "upcast_fp32", "mask_before_op", "clamp_input"),
    variable=(None,),
    line=("seq_is_weights = torch.exp((torch.log(rollout_is_weights + 1e-10) * response_mask).sum(dim=-1) / (response_mask_sum + 1e-8))",),
)


def compute_rollout_is_weights(old_log_prob, rollout_log_probs, response_mask, threshold=2.0):
    log_ratio = torch.clamp(old_log_prob - rollout_log_probs, min=-20.0, max=20.0)
    weights = torch.exp(log_ratio).clamp(max=threshold)
    return (weights * response_mask).detach()


def compute_policy_loss_geo_mean(old_log_prob, log_prob, advantages, response_mask, cliprange=0.4, rollout_is_weights=None):
    negative_approx_kl = log_prob - old_log_prob
    sgn_advantage = torch.sign(advantages)
    negative_approx_kl_clamp = torch.clamp(negative_approx_kl, -cliprange, cliprange)
    negative_approx_kl_min = torch.min(sgn_advantage * negative_approx_kl, sgn_advantage * negative_approx_kl_clamp)
    negative_approx_kl_min = sgn_advantage * negative_approx_kl_min
    response_mask_sum = response_mask.sum(dim=-1)
    ratio = torch.exp((negative_approx_kl_min * response_mask).sum(dim=-1) / (response_mask_sum + 1e-8))
    advantage = (advantages * response_mask).sum(dim=-1) / (response_mask_sum + 1e-8)
    pg_losses = -advantage * ratio
    if rollout_is_weights is not None:
        seq_is_weights = torch.exp((torch.log(rollout_is_weights + 1e-10) * response_mask).sum(dim=-1) / (response_mask_sum + 1e-8))
        pg_losses = pg_losses * seq_is_weights
    return torch.mean(pg_losses)


def response_log_probs(model, input_ids):
    logits = model(input_ids[:, :-1]).log_softmax(-1)
    return logits.gather(-1, input_ids[:, 1:].unsqueeze(-1)).squeeze(-1)


def build():
    torch.manual_seed(2208)
    model = nn.Sequential(nn.Embedding(32, 10), nn.Linear(10, 32))
    input_ids = torch.randint(1, 32, (4, 9))
    lengths = torch.tensor([5, 8, 3, 8])
    response_mask = (torch.arange(8)[None] < lengths[:, None]).float()
    with torch.no_grad():
        old_log_prob = response_log_probs(model, input_ids)
    rollout_log_probs = old_log_prob + 0.05 * torch.randn(4, 8)
    weights = compute_rollout_is_weights(old_log_prob, rollout_log_probs, response_mask)
    batch = dict(
        input_ids=input_ids,
        old_log_prob=old_log_prob,
        response_mask=response_mask,
        rollout_is_weights=weights.half(),  # the batch travels between workers in half
        advantages=torch.tensor([0.8, -0.4, -1.1, 0.7])[:, None].expand(4, 8),
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6)
    return SimpleNamespace(model=model, optimizer=optimizer, batch=batch)


def run(s=None):
    s = s or build()
    log_prob = response_log_probs(s.model, s.batch["input_ids"])
    loss = compute_policy_loss_geo_mean(
        s.batch["old_log_prob"], log_prob, s.batch["advantages"], s.batch["response_mask"], rollout_is_weights=s.batch["rollout_is_weights"]
    )
    s.optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(s.model.parameters(), 1.0)
    s.optimizer.step()
    return loss


if __name__ == "__main__":
    run()
