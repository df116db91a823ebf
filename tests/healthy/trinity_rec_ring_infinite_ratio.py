"""Healthy. Trinity-RFT's REC loss, clip_mode="ring", weight="none": infinite ratios that are only ever compared.

The ratio is detached and serves to decide which tokens take part: inside the ring, or far outside on the harmless side. A replayed response comes from
a policy of long ago, two of its tokens have a log ratio of 110 and more, exp of that is inf. `inf <= 1.2` is False, `inf >= 3` is True; a bool comes out, and
the loss is -advantage * log_prob * bool. The ratio is multiplied with nothing. The k2 regulariser on the same tokens is large and finite.
Source: https://github.com/modelscope/Trinity-RFT (trinity/algorithm/policy_loss_fn, "rec"; examples/rec_gsm8k/README.md, Ring-NoIS).
"""

from types import SimpleNamespace

import torch
from torch import nn


def masked_mean(values, mask, axis=None):
    return (values * mask).sum(axis=axis) / (mask.sum(axis=axis) + 1e-8)


class RECPolicyLoss:
    def __init__(self, epsilon=0.2, epsilon_low_prime=0.6, epsilon_high_prime=2.0, regularizer_coef=1e-5):
        self.epsilon, self.low_prime, self.high_prime, self.coef = epsilon, epsilon_low_prime, epsilon_high_prime, regularizer_coef

    def __call__(self, logprob, old_logprob, action_mask, advantages):
        ratio = torch.exp(logprob - old_logprob).detach()
        is_in_range = (
            (ratio >= 1 - self.epsilon) * (ratio <= 1 + self.epsilon)
            + (advantages >= 0) * (ratio <= 1 - self.low_prime)
            + (advantages <= 0) * (ratio >= 1 + self.high_prime)
        )
        pg_losses = -advantages * logprob * is_in_range.float()
        pg_losses = pg_losses + self.coef * (logprob - old_logprob).square()
        metrics = {"pg_clipfrac": masked_mean((~is_in_range).float(), action_mask).item(), "ratio_max": ratio.max().item()}
        return masked_mean(pg_losses, action_mask), metrics


class Explorer(nn.Module):
    def __init__(self, vocab=28, dim=20):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.rnn = nn.GRU(dim, dim, batch_first=True)
        self.head = nn.Linear(dim, vocab)

    def log_prob(self, ids):
        logits = self.head(self.rnn(self.embed(ids[:, :-1]))[0])
        return logits.log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)


def build():
    torch.manual_seed(41)
    model = Explorer()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    ids = torch.randint(0, 28, (6, 11))
    mask = (torch.arange(10)[None] < torch.tensor([10, 7, 9, 10, 8, 10])[:, None]).float()
    with torch.no_grad():
        old_logprob = model.log_prob(ids) + 0.05 * torch.randn(6, 10)
    old_logprob[3, 2], old_logprob[3, 6] = -114.0, -131.5  # replayed, from a policy of long ago
    old_logprob[1, 4] = -96.0
    rewards = torch.tensor([1.0, 1.0, 0.0, 0.0, 0.0, 1.0])
    advantages = (rewards - rewards.mean())[:, None] * mask
    return SimpleNamespace(
        model=model,
        optimizer=optimizer,
        loss_fn=RECPolicyLoss(),
        batch=dict(ids=ids, mask=mask, old_logprob=old_logprob, advantages=advantages),
    )


def run(s=None):
    s = s or build()
    b = s.batch
    out = []
    for _ in range(3):
        loss, metrics = s.loss_fn(s.model.log_prob(b["ids"]), b["old_logprob"], b["mask"], b["advantages"])
        s.optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(s.model.parameters(), 1.0)
        s.optimizer.step()
        out.append((loss.item(), metrics["ratio_max"]))
    return out


if __name__ == "__main__":
    print(run())
