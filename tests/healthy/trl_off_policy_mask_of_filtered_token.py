"""Healthy. TRL GRPO with the off-policy sequence mask of DeepSeek-V3.2 next to truncated importance sampling: sampling log-probs of -inf and NaN.

vLLM reports the log-prob after top-k: a token forced by the grammar lies outside and is -inf, a tool token that it could not score is NaN. The mismatch
ratio exp(old - sampling) is inf for the first and is truncated at 2, a constant; the NaN becomes a difference of 0. The KL of the off-policy mask is
-inf for the forced token, -3.4e38 after nan_to_num, and is only compared with the threshold. Everything is made without gradient, the PPO ratio
itself is taken against the trainer's own log-probs.
Source: https://github.com/huggingface/trl/blob/main/trl/trainer/grpo_trainer.py (get_off_policy_mask, vllm_importance_sampling_mode="token_truncate").
"""

from types import SimpleNamespace

import torch
from torch import nn
import torch.nn.functional as F


class Policy(nn.Module):
    def __init__(self, vocab=30, dim=20):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.rnn = nn.GRU(dim, dim, batch_first=True)
        self.lm_head = nn.Linear(dim, vocab)

    def forward(self, ids):
        return self.lm_head(self.rnn(self.embed(ids))[0])


def get_per_token_logps(model, ids):
    return F.log_softmax(model(ids[:, :-1]), -1).gather(-1, ids[:, 1:, None]).squeeze(-1)


@torch.no_grad()
def get_is_ratio(old_per_token_logps, sampling_per_token_logps, mask, clip_max=2.0):
    per_token_logps_diff = (old_per_token_logps - sampling_per_token_logps) * mask
    per_token_logps_diff = torch.where(per_token_logps_diff.isnan(), 0.0, per_token_logps_diff)
    return torch.exp(per_token_logps_diff).clamp(max=clip_max)


@torch.no_grad()
def get_off_policy_mask(advantages, per_token_logps, sampling_per_token_logps, mask, off_policy_threshold):
    kl_div = sampling_per_token_logps - per_token_logps
    kl_div = torch.nan_to_num(kl_div, nan=0.0)
    seq_kl_sum = (kl_div * mask).sum(dim=1, keepdim=True)
    avg_seq_kl = seq_kl_sum / mask.sum(dim=1, keepdim=True).clamp(min=1.0)
    return ((advantages >= 0) | (avg_seq_kl <= off_policy_threshold)).to(mask.dtype)


def build():
    torch.manual_seed(14)
    model = Policy()
    ids = torch.randint(0, 30, (4, 8))
    mask = torch.ones(4, 7)
    mask[2, 5:] = 0
    with torch.no_grad():
        old = get_per_token_logps(model, ids)
    sampling = old + 0.05 * torch.randn_like(old)
    sampling[0, 3] = float("-inf")
    sampling[3, 1:4] = float("-inf")
    sampling[1, 2] = float("nan")
    sampling[2, 6] = float("-inf")  # padding
    batch = dict(ids=ids, mask=mask, old=old, sampling=sampling, advantages=torch.tensor([[1.0], [-0.6], [0.7], [-1.1]]))
    return SimpleNamespace(model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3), batch=batch)


def run(s=None):
    s = s or build()
    losses = []
    for _ in range(3):
        s.optimizer.zero_grad()
        b = s.batch
        per_token_logps = get_per_token_logps(s.model, b["ids"])
        coef_1 = torch.exp(per_token_logps - b["old"])
        coef_2 = coef_1.clamp(0.8, 1.2)
        per_token_loss = -torch.min(coef_1 * b["advantages"], coef_2 * b["advantages"])
        per_token_loss = per_token_loss * get_is_ratio(b["old"], b["sampling"], b["mask"])
        per_token_loss = per_token_loss * get_off_policy_mask(b["advantages"], per_token_logps.detach(), b["sampling"], b["mask"], 0.5)
        loss = (per_token_loss * b["mask"]).sum() / b["mask"].sum()
        loss.backward()
        nn.utils.clip_grad_norm_(s.model.parameters(), 1.0)
        s.optimizer.step()
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    print(run())
