"""Trinity-RFT, TOPRPolicyLossFn - healthy: the ratio of a stale token is inf for a moment.

exp of the log ratio leaves float32 on a counted token of a rejected answer; TOPR clamps the ratio to [0, 1] and detaches it before it weighs the log-prob, so the weight is 1
and no gradient goes through exp. Loss, gradients and weights are finite and those of a weight 1. (Source: modelscope/Trinity-RFT, trinity/algorithm/policy_loss_fn/topr_policy_loss.py.)
"""

from types import SimpleNamespace

import torch
import torch.nn as nn


class Policy(nn.Module):
    def __init__(self, vocab=15, dim=12):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.rnn = nn.GRU(dim, dim, batch_first=True)
        self.head = nn.Linear(dim, vocab)

    def forward(self, tokens):
        return self.head(self.rnn(self.embed(tokens))[0])


def masked_mean(values, mask, axis=None):
    return (values * mask).sum(axis=axis) / (mask.sum(axis=axis) + 1e-8)


def get_logprob(model, tokens):
    logits = model(tokens[:, :-1])
    return logits.log_softmax(-1).gather(-1, tokens[:, 1:, None]).squeeze(-1)


def build():
    torch.manual_seed(14)
    model = Policy()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    tokens = torch.randint(0, 15, (4, 8))
    action_mask = torch.ones(4, 7)
    action_mask[:, :2] = 0
    with torch.no_grad():
        old_logprob = get_logprob(model, tokens) + 0.1 * torch.randn(4, 7)
    old_logprob[1, 4] = -103.5
    advantages = torch.tensor([0.8, -0.7, -0.4, 0.3])[:, None].expand(4, 7)
    return SimpleNamespace(
        model=model,
        optimizer=optimizer,
        tokens=tokens,
        action_mask=action_mask,
        old_logprob=old_logprob,
        advantages=advantages,
        threshold=0.0,
    )


def topr_loss(logprob, old_logprob, action_mask, advantages, threshold):
    rewards = advantages
    log_ratio = logprob - old_logprob
    ratio = torch.exp(log_ratio).detach()
    alpha = torch.where(rewards > threshold, torch.ones_like(ratio), torch.clamp(ratio, 0.0, 1.0))
    loss = -alpha * rewards * logprob
    return masked_mean(loss, action_mask), {"ratio_max": ratio.max().item()}


def run(s=None):
    s = s or build()
    logprob = get_logprob(s.model, s.tokens)
    loss, s.metrics = topr_loss(logprob, s.old_logprob, s.action_mask, s.advantages, s.threshold)
    s.optimizer.zero_grad()
    loss.backward()
    s.optimizer.step()
    return loss


if __name__ == "__main__":
    print(run())
