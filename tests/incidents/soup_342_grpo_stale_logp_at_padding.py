"""Soup (MakazhanAlpamys), the default GRPO variant on a 7B run - the loss is finite, grad_norm is nan.

At a padded position the stored log-prob of the old policy is far below the one of today, exp of the difference is inf. The advantage is positive, so min takes the
clipped branch and the completion mask removes the position: the loss is fine, but exp's backward computes 0 * inf. (Source: MakazhanAlpamys/Soup issue 342 and PR 1084,
trainer/grpo, _compute_loss of variant None.) Heals: masking the log ratio before exp (log_ratio * completion_mask); clamping it to [-20, 20] before exp.
Does not: torch.nan_to_num(coef_1, posinf=1e4) after exp; per_token_loss.masked_fill instead of the product; clip_grad_norm_; a lower learning rate.
"""

from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F

from expected import Expected

EXPECTED = Expected(
    phase=("backward",),
    cause=("where_grad_trap", "inf_times_zero_mask"),
    op=("exp",),
    index=(1, 3),
    masked=True,
    role=("ratio", "is_weight"),
    fix=("mask_before_op", "clamp_exponent", "where_on_detached", "clamp_input", "fix_upstream", "drop_invalid_sample"),
    variable=("coef_1",),
    line=("coef_1 = torch.exp(log_ratio)",),
)


class TinyLM(nn.Module):
    def __init__(self, vocab=17, dim=12):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.rnn = nn.GRU(dim, dim, batch_first=True)
        self.lm_head = nn.Linear(dim, vocab)

    def forward(self, input_ids):
        hidden, _ = self.rnn(self.embed(input_ids))
        return self.lm_head(hidden)


def selective_log_softmax(logits, index):
    return F.log_softmax(logits, dim=-1).gather(-1, index.unsqueeze(-1)).squeeze(-1)


def get_per_token_logps(model, prompt_ids, completion_ids):
    input_ids = torch.cat([prompt_ids, completion_ids], dim=1)
    logits = model(input_ids)[:, prompt_ids.size(1) - 1 : -1]
    return selective_log_softmax(logits, completion_ids)


def build():
    torch.manual_seed(342)
    model = TinyLM()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-5)
    prompt_ids = torch.randint(1, 17, (4, 4))
    completion_ids = torch.randint(1, 17, (4, 6))
    completion_mask = torch.ones(4, 6)
    completion_mask[1, 3:] = 0
    completion_mask[3, 5:] = 0
    completion_ids = completion_ids.masked_fill(completion_mask == 0, 0)
    with torch.no_grad():
        old_per_token_logps = get_per_token_logps(model, prompt_ids, completion_ids) + 0.05 * torch.randn(4, 6)
    old_per_token_logps[1, 3:] = torch.tensor([-200.0, -200.0, -200.0])
    advantages = torch.tensor([-0.9, 1.3, 0.4, -0.8])
    return SimpleNamespace(
        model=model,
        optimizer=optimizer,
        prompt_ids=prompt_ids,
        completion_ids=completion_ids,
        completion_mask=completion_mask,
        old_per_token_logps=old_per_token_logps,
        advantages=advantages,
        epsilon_low=0.2,
        epsilon_high=0.2,
    )


def compute_loss(s):
    completion_mask = s.completion_mask
    advantages = s.advantages.unsqueeze(1)
    per_token_logps = get_per_token_logps(s.model, s.prompt_ids, s.completion_ids)
    log_ratio = per_token_logps - s.old_per_token_logps
    coef_1 = torch.exp(log_ratio)
    coef_2 = torch.clamp(coef_1, 1 - s.epsilon_low, 1 + s.epsilon_high)
    per_token_loss1 = coef_1 * advantages
    per_token_loss2 = coef_2 * advantages
    per_token_loss = -torch.min(per_token_loss1, per_token_loss2)
    loss = ((per_token_loss * completion_mask).sum(-1) / completion_mask.sum(-1).clamp(min=1.0)).mean()
    return loss


def run(s=None):
    s = s or build()
    s.optimizer.zero_grad()
    loss = compute_loss(s)
    loss.backward()
    s.grad_norm = nn.utils.clip_grad_norm_(s.model.parameters(), 1.0)
    s.optimizer.step()
    return loss


if __name__ == "__main__":
    print(run())
