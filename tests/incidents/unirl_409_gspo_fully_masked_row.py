"""GSPO with text loss masks: a rollout that consists of observation tokens alone has no active token, and its mean log ratio is 0/0.

The sequence ratio is exp of the mean over active tokens. One row's turn was cut before the policy said anything; its loss mask is zero everywhere,
the sum of the masked log ratios is 0 and so is the count. The NaN passes clamp, min and the mean over rows.
Source: https://github.com/Tencent-Hunyuan/UniRL/pull/409 ("GSPO uses masked sequence log-prob means and excludes sequences with no active tokens").
Heals: leaving such rows out, at least 1 in the denominator. Does not: clamping the ratio, an advantage of 0 for that row (0 * NaN).
"""

from types import SimpleNamespace

import torch
from torch import nn

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("empty_mask_mean", "zero_div_zero"),
    op=("div",),
    index=(2,),
    masked=None,
    role=("log_ratio", "ratio"),
    fix=("clamp_denominator", "guard_empty", "drop_invalid_sample"),
    variable=("seq_log_ratio",),
    line=("seq_log_ratio = (log_ratio * loss_mask).sum(dim=-1) / loss_mask.sum(dim=-1)",),
)


class TinyPolicy(nn.Module):
    def __init__(self, vocab=17, dim=8):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.rnn = nn.GRU(dim, dim, batch_first=True)
        self.lm_head = nn.Linear(dim, vocab)

    def log_probs(self, ids):
        h, _ = self.rnn(self.embed(ids[:, :-1]))
        logp = self.lm_head(h).log_softmax(-1)
        return logp.gather(-1, ids[:, 1:, None]).squeeze(-1)


def gspo_loss(log_probs, old_log_probs, advantages, loss_mask, clip_low=3e-4, clip_high=4e-4):
    log_ratio = log_probs - old_log_probs
    seq_log_ratio = (log_ratio * loss_mask).sum(dim=-1) / loss_mask.sum(dim=-1)
    ratio = seq_log_ratio.exp()
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high)
    return -torch.min(ratio * advantages, clipped * advantages).mean()


def build():
    torch.manual_seed(409)
    policy = TinyPolicy()
    ids = torch.randint(0, 17, (4, 7))
    loss_mask = torch.tensor([[0, 0, 1, 1, 1, 1], [0, 1, 1, 0, 0, 1], [0, 0, 0, 0, 0, 0], [0, 0, 0, 1, 1, 0]], dtype=torch.float32)
    with torch.no_grad():
        old_log_probs = policy.log_probs(ids) + 1e-4 * torch.randn(4, 6)
    batch = dict(ids=ids, loss_mask=loss_mask, old_log_probs=old_log_probs, advantages=torch.tensor([0.9, -0.4, 0.0, -0.5]))
    return SimpleNamespace(model=policy, optimizer=torch.optim.AdamW(policy.parameters(), lr=1e-4), batch=batch)


def run(s=None):
    s = s or build()
    b = s.batch
    for _ in range(2):
        loss = gspo_loss(s.model.log_probs(b["ids"]), b["old_log_probs"], b["advantages"], b["loss_mask"])
        s.optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(s.model.parameters(), 1.0)
        s.optimizer.step()
    return float(loss.detach())


if __name__ == "__main__":
    print(run())
