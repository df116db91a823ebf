"""Soup / TRL GRPO, per-token clipped loss - the ratio of a padding token overflows behind min and mask.

At a padding position the stored old log-prob is -200 while the policy gives the pad token almost 1: exp(200) is inf. The advantage is positive, so min takes the clipped branch,
the completion mask makes it 0 and the loss is finite; backward multiplies the 0 with inf in exp. Source: https://github.com/MakazhanAlpamys/Soup/issues/342 (grad_norm nan, loss finite).
Heals: masking log_ratio before the exp; clamping log_ratio to [-20, 20]; where on old_per_token_logps with the mask. Does not: torch.where on per_token_loss after the exp;
clamping coef_1 after the exp (0 * inf again); clip_grad_norm_.
"""

from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F

from expected import Expected

EXPECTED = Expected(
    phase=("backward",),
    cause=("where_grad_trap", "exp_overflow", "inf_times_zero_mask"),
    op=("exp",),
    index=(0, 4),
    masked=True,
    role=("ratio", "is_weight"),
    fix=("mask_before_op", "clamp_exponent", "fix_upstream", "where_on_detached", "clamp_input"),
    variable=("coef_1",),
    line=("coef_1 = torch.exp(log_ratio)",),
)


class TinyLM(nn.Module):
    def __init__(self, vocab=32, hidden=16):
        super().__init__()
        self.embed_tokens = nn.Embedding(vocab, hidden)
        self.rnn = nn.GRU(hidden, hidden, batch_first=True)
        self.lm_head = nn.Linear(hidden, vocab)

    def forward(self, input_ids):
        return self.lm_head(self.rnn(self.embed_tokens(input_ids))[0])


def get_per_token_logps(model, input_ids, logits_to_keep):
    logits = model(input_ids)[:, :-1][:, -logits_to_keep:]
    ids = input_ids[:, -logits_to_keep:]
    return torch.gather(F.log_softmax(logits, dim=-1), 2, ids.unsqueeze(-1)).squeeze(-1)


def build():
    torch.manual_seed(0)
    model = TinyLM()
    prompt_ids = torch.randint(1, 32, (4, 3))
    completion_ids = torch.randint(1, 32, (4, 6))
    completion_mask = torch.ones(4, 6)
    for row, length in enumerate([4, 6, 5, 6]):
        completion_mask[row, length:] = 0.0
    completion_ids[completion_mask == 0] = 0
    input_ids = torch.cat([prompt_ids, completion_ids], dim=1)
    with torch.no_grad():
        old_per_token_logps = get_per_token_logps(model, input_ids, 6) + 0.1 * torch.randn(4, 6)
        old_per_token_logps[completion_mask == 0] = -200.0
    advantages = torch.tensor([1.1, -0.4, 0.2, -0.9])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    return SimpleNamespace(
        model=model,
        optimizer=optimizer,
        input_ids=input_ids,
        completion_mask=completion_mask,
        old_per_token_logps=old_per_token_logps,
        advantages=advantages,
    )


def compute_loss(s, epsilon_low=0.2, epsilon_high=0.2):
    completion_mask = s.completion_mask
    per_token_logps = get_per_token_logps(s.model, s.input_ids, completion_mask.size(1))
    log_ratio = per_token_logps - s.old_per_token_logps
    coef_1 = torch.exp(log_ratio)
    coef_2 = torch.clamp(coef_1, 1 - epsilon_low, 1 + epsilon_high)
    per_token_loss1 = coef_1 * s.advantages.unsqueeze(1)
    per_token_loss2 = coef_2 * s.advantages.unsqueeze(1)
    per_token_loss = -torch.min(per_token_loss1, per_token_loss2)
    return ((per_token_loss * completion_mask).sum(-1) / completion_mask.sum(-1).clamp(min=1.0)).mean()


def run(s=None):
    s = s or build()
    loss = compute_loss(s)
    s.optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(s.model.parameters(), 0.2)
    s.optimizer.step()
    return loss


if __name__ == "__main__":
    print(run())
