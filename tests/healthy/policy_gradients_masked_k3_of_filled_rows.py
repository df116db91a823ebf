"""policy-gradients, GRPO loss whose k3 masks the log ratio before the exp - healthy.

The replay buffer pads log-probs of other lengths with -1e4 and reference log-probs with 1e4, so the log ratio of padding is -1e4 or 1e4 and its exp would be inf; approx_kl and the
ratio multiply the mask on the log ratio first (finite times 0), and exp sees 0 there. The running minimum of kept ratios starts at +inf, the metric of a row whose tokens were all
cut is NaN; both are only logged. (Source: zafstojano/policy-gradients, loss.py, approx_kl and GRPOLoss.)
"""

from types import SimpleNamespace

import torch
from torch import nn


def approx_kl(log_probs, log_probs_ref, action_mask):
    log_ratio = log_probs - log_probs_ref
    if action_mask is not None:
        log_ratio = log_ratio * action_mask
    return (-log_ratio).exp() + log_ratio - 1


def masked_mean(tensor, mask):
    return (tensor * mask).sum() / mask.sum().clamp(min=1)


class GRPOLoss(nn.Module):
    def __init__(self, clip_eps=0.2, beta=0.05):
        super().__init__()
        self.clip_eps = clip_eps
        self.beta = beta

    def forward(self, log_probs, experience):
        mask = experience.action_mask
        kl = approx_kl(log_probs, experience.log_probs_ref, mask)
        ratio = ((log_probs - experience.log_probs_old) * mask).exp()
        surr1 = ratio * experience.advantages
        surr2 = ratio.clamp(1 - self.clip_eps, 1 + self.clip_eps) * experience.advantages
        return masked_mean(-torch.min(surr1, surr2) + self.beta * kl, mask), ratio.detach()


class Policy(nn.Module):
    def __init__(self, vocab=18, dim=16):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.rnn = nn.GRU(dim, dim, batch_first=True)
        self.head = nn.Linear(dim, vocab)

    def forward(self, ids):
        logits = self.head(self.rnn(self.embed(ids))[0])[:, :-1]
        return logits.log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)


def build():
    torch.manual_seed(19)
    model = Policy()
    ids = torch.randint(0, 18, (4, 9))
    mask = torch.ones(4, 8)
    mask[1, 5:] = 0
    mask[3] = 0
    with torch.no_grad():
        log_probs = model(ids)
    experience = SimpleNamespace(
        action_mask=mask,
        log_probs_old=(log_probs + 0.02 * torch.randn(4, 8)).masked_fill(mask == 0, -1e4),
        log_probs_ref=(log_probs + 0.05 * torch.randn(4, 8)).masked_fill(mask == 0, 1e4),
        advantages=torch.tensor([1.0, -1.0, 0.6, -0.6])[:, None],
    )
    return SimpleNamespace(
        model=model,
        optimizer=torch.optim.Adam(model.parameters(), lr=1e-3),
        ids=ids,
        experience=experience,
        objective=GRPOLoss(),
        metrics={},
    )


def run(s=None):
    s = s or build()
    lowest = torch.tensor(float("inf"))
    for _ in range(3):
        loss, ratio = s.objective(s.model(s.ids), s.experience)
        kept = ratio.masked_fill(s.experience.action_mask == 0, float("inf"))
        lowest = torch.minimum(lowest, kept.min())
        s.metrics["ratio_min"] = lowest.item()
        s.metrics["row_ratio"] = ((ratio * s.experience.action_mask).sum(-1) / s.experience.action_mask.sum(-1)).tolist()
        s.optimizer.zero_grad()
        loss.backward()
        grad_norm = torch.nn.utils.clip_grad_norm_(s.model.parameters(), 1.0)
        if not torch.isfinite(grad_norm):
            continue
        s.optimizer.step()
    return loss


if __name__ == "__main__":
    print(run())
