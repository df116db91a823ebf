"""TRL GMPO: the log ratios are clipped in log space, but one-sidedly, as in PPO; what is left on the open side goes through exp.

For a negative advantage the clip takes max(log_ratio, clipped), so a large positive log ratio stays as it is, and only the mean over the answer keeps
it small. The logits are divided by a sampling temperature of 0.1. One wrong answer has two tokens, a stop word and EOS, that the old policy had all but
excluded and that the policy (several updates later in an asynchronous run) now likes: log ratios around 95, their mean too, and exp(95) is inf. Its
negative advantage makes the loss inf and the gradient NaN.
Source: https://github.com/huggingface/trl/blob/main/trl/experimental/gmpo/gmpo_trainer.py (log_importance_weights, coef).
Heals: a bound on the exponent (mean log ratio). Does not: epsilon_low / epsilon_high (they bound the other side), the clamp(min=1) of the length,
gradient clipping.
"""

from types import SimpleNamespace

import torch
from torch import nn
import torch.nn.functional as F

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("exp_overflow", "seq_ratio_overflow"),
    op=("exp",),
    index=(3,),
    masked=False,
    role=("ratio", "is_weight"),
    fix=("clamp_exponent", "drop_invalid_sample"),
    variable=("coef",),
    line=("coef = torch.exp(log_importance_weights)",),
)

TEMPERATURE = 0.1


class Policy(nn.Module):
    def __init__(self, vocab=30, dim=20):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.rnn = nn.GRU(dim, dim, batch_first=True)
        self.lm_head = nn.Linear(dim, vocab)

    def forward(self, ids):
        return self.lm_head(self.rnn(self.embed(ids))[0])


def get_per_token_logps(model, ids, completion_ids):
    logits = model(ids) / TEMPERATURE
    return F.log_softmax(logits, -1).gather(-1, completion_ids.unsqueeze(-1)).squeeze(-1)


def gmpo_loss(per_token_logps, inputs, epsilon_low=0.4, epsilon_high=0.4):
    mask, advantages = inputs["completion_mask"], inputs["advantages"]
    log_ratio = per_token_logps - inputs["old_per_token_logps"]
    clamped_log_ratio = torch.clamp(log_ratio, min=-epsilon_low, max=epsilon_high)
    clipped_log_ratio = torch.where(
        advantages.unsqueeze(1) > 0, torch.minimum(log_ratio, clamped_log_ratio), torch.maximum(log_ratio, clamped_log_ratio)
    )
    log_importance_weights = (clipped_log_ratio * mask).sum(-1) / mask.sum(-1).clamp(min=1.0)
    coef = torch.exp(log_importance_weights)
    per_sequence_loss = -coef * advantages
    return per_sequence_loss.mean()


def build():
    torch.manual_seed(21)
    model = Policy()
    ids = torch.randint(0, 30, (4, 6))
    completion_ids = torch.randint(0, 30, (4, 6))
    mask = torch.ones(4, 6)
    mask[1, 4:] = 0
    mask[3, 2:] = 0
    with torch.no_grad():
        old = get_per_token_logps(model, ids, completion_ids)
        old = old + 0.1 * torch.randn_like(old)
        old[3, :2] = old[3, :2] - torch.tensor([93.0, 97.0])
    batch = dict(
        ids=ids,
        completion_ids=completion_ids,
        completion_mask=mask,
        old_per_token_logps=old,
        advantages=torch.tensor([1.2, -0.4, 0.3, -1.1]),
    )
    return SimpleNamespace(model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-4), batch=batch)


def run(s=None):
    s = s or build()
    for _ in range(2):
        s.optimizer.zero_grad()
        loss = gmpo_loss(get_per_token_logps(s.model, s.batch["ids"], s.batch["completion_ids"]), s.batch)
        loss.backward()
        nn.utils.clip_grad_norm_(s.model.parameters(), 1.0)
        s.optimizer.step()
    return loss.item()


if __name__ == "__main__":
    print(run())
