"""Length-adaptive GAE with the floor of AReaL: lambda = max(0, 1 - 1 / (alpha * length)).

The batch holds an aborted rollout of length 0. Its quotient is inf and its lambda -inf for a moment; the floor makes it 0, before anything multiplies
it. Advantages, gradients and weights are finite and the other rows are untouched.

Source: https://github.com/areal-project/AReaL areal/trainer/ppo/lambda_fn.py
"""

from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F


def length_adaptive_lambda(lengths, alpha):
    return (1.0 - 1.0 / (alpha * lengths)).clamp_min(0.0)


def masked_whiten(values, mask, eps=1e-8):
    n = mask.sum()
    mean = (values * mask).sum() / n
    var = ((values - mean) ** 2 * mask).sum() / n
    return (values - mean) * torch.rsqrt(var + eps)


@torch.no_grad()
def decoupled_gae(rewards, values, mask, gamma=1.0, alpha=0.5):
    lam = length_adaptive_lambda(mask.sum(1), alpha)
    last = torch.zeros(rewards.shape[0])
    advantages = torch.zeros_like(rewards)
    for t in reversed(range(rewards.shape[1])):
        nextvalues = values[:, t + 1] * mask[:, t + 1] if t + 1 < rewards.shape[1] else torch.zeros(rewards.shape[0])
        delta = (rewards[:, t] + gamma * nextvalues - values[:, t]) * mask[:, t]
        last = delta + gamma * lam * last
        advantages[:, t] = last
    returns = (rewards * mask).flip(1).cumsum(1).flip(1)
    return masked_whiten(advantages, mask), returns


class ActorCritic(nn.Module):
    def __init__(self, vocab=20, hidden=16):
        super().__init__()
        self.embed = nn.Embedding(vocab, hidden)
        self.lm_head = nn.Linear(hidden, vocab)
        self.value_head = nn.Linear(hidden, 1)

    def forward(self, ids):
        h = torch.tanh(self.embed(ids))
        return self.lm_head(h), self.value_head(h).squeeze(-1)


def build():
    torch.manual_seed(37)
    model = ActorCritic()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    ids = torch.randint(0, 20, (4, 11))
    lengths = torch.tensor([7, 10, 0, 5])
    mask = (torch.arange(10)[None] < lengths[:, None]).float()
    rewards = torch.zeros(4, 10)
    rewards[0, 6], rewards[1, 9] = 1.0, 1.0
    return SimpleNamespace(model=model, optimizer=optimizer, ids=ids, mask=mask, rewards=rewards)


def run(s=None):
    s = s or build()
    logits, values = s.model(s.ids[:, :-1])
    advantages, returns = decoupled_gae(s.rewards, values.detach(), s.mask)
    log_probs = F.log_softmax(logits, -1).gather(-1, s.ids[:, 1:, None]).squeeze(-1)
    ratio = torch.exp(log_probs - log_probs.detach())
    pg = -torch.min(ratio * advantages, ratio.clamp(0.8, 1.28) * advantages)
    vf_loss = 0.5 * ((values - returns) ** 2 * s.mask).sum() / s.mask.sum()
    loss = (pg * s.mask).sum() / s.mask.sum() + 0.5 * vf_loss
    s.optimizer.zero_grad()
    loss.backward()
    s.optimizer.step()
    return loss


if __name__ == "__main__":
    print(run())
