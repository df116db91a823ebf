"""low_var_kl clamps its result, not the exponent; the reference worker reports 0 on padding, so exp overflows there and backward is NaN.
https://github.com/verl-project/verl/issues/891
"""

from types import SimpleNamespace

import torch
import torch.nn as nn

from expected import Expected

EXPECTED = Expected(
    phase=("backward",),
    cause=("where_grad_trap", "inf_times_zero_mask", "exp_overflow"),
    op=("exp",),
    index=(1, 4),
    masked=True,
    role=("kl", "ratio"),
    fix=("clamp_exponent", "mask_before_op"),
    variable=("ratio",),
    line=("ratio = torch.exp(kl)",),
)


def kl_penalty(logprob, ref_logprob, kl_penalty_type="low_var_kl"):
    if kl_penalty_type == "kl":
        return logprob - ref_logprob
    kl = ref_logprob - logprob
    ratio = torch.exp(kl)
    kld = (ratio - kl - 1).contiguous()
    return torch.clamp(kld, min=-10, max=10)


def masked_mean(values, mask):
    return (values * mask).sum() / mask.sum()


def compute_policy_loss(old_log_prob, log_prob, advantages, eos_mask, cliprange=0.2):
    ratio = torch.exp(torch.clamp(log_prob - old_log_prob, -20.0, 20.0))
    pg_losses = -advantages * ratio
    pg_losses2 = -advantages * torch.clamp(ratio, 1.0 - cliprange, 1.0 + cliprange)
    return masked_mean(torch.max(pg_losses, pg_losses2), eos_mask)


class DataParallelPPOActor:
    def __init__(self, actor_module, actor_optimizer, kl_loss_coef=0.001, grad_clip=1.0):
        self.actor_module, self.actor_optimizer = actor_module, actor_optimizer
        self.kl_loss_coef, self.grad_clip = kl_loss_coef, grad_clip

    def _forward_micro_batch(self, data):
        ids, width = data["input_ids"], data["response_mask"].shape[1]
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = self.actor_module(ids)
        log_probs = logits[:, -width - 1 : -1].float().log_softmax(-1)
        return log_probs.gather(-1, ids[:, -width:].unsqueeze(-1)).squeeze(-1)

    def update_policy(self, mini_batch):
        self.actor_optimizer.zero_grad()
        total = 0.0
        for data in mini_batch:
            log_prob = self._forward_micro_batch(data)
            pg_loss = compute_policy_loss(data["old_log_probs"], log_prob, data["advantages"], data["response_mask"])
            kld = kl_penalty(log_prob, data["ref_log_prob"])
            loss = (pg_loss + self.kl_loss_coef * masked_mean(kld, data["response_mask"])) / len(mini_batch)
            loss.backward()
            total = total + loss.detach()
        torch.nn.utils.clip_grad_norm_(self.actor_module.parameters(), self.grad_clip)
        self.actor_optimizer.step()
        return total


def build():
    torch.manual_seed(891)
    module = nn.Sequential(nn.Embedding(16, 8), nn.Linear(8, 16))
    with torch.no_grad():
        module[1].bias[0] = -118.0  # the policy never emits pad
    actor = DataParallelPPOActor(module, torch.optim.AdamW(module.parameters(), lr=1e-6))
    mini_batch = []
    for m in range(2):
        data = {"input_ids": torch.randint(1, 16, (3, 9)), "response_mask": torch.ones(3, 6), "advantages": torch.randn(3, 1).expand(3, 6)}
        if m == 1:
            data["response_mask"][1, 4:] = 0
            data["input_ids"][1, 7:] = 0
        with torch.no_grad():
            data["old_log_probs"] = actor._forward_micro_batch(data)
        data["ref_log_prob"] = (data["old_log_probs"] + 0.05 * torch.randn(3, 6)) * data["response_mask"]
        mini_batch.append(data)
    return SimpleNamespace(model=module, optimizer=actor.actor_optimizer, batch=mini_batch, actor=actor)


def run(s=None):
    s = s or build()
    return s.actor.update_policy(s.batch)
