"""REINFORCE with a clamped, detached importance weight: exp overflows to inf on tokens that the sampler found nearly impossible. Healthy.

Two tokens were forced into the rollout (a stop sequence) with a sampler log probability of -120 and -300, so the weight is exp(> 88) = inf. The weight
carries no gradient, the clamp takes it to 10, and the gradient of the loss is weight * advantage * d log p alone: finite and bounded.
Source: https://github.com/meta-pytorch/torchforge/blob/main/src/forge/losses/reinforce_loss.py (ReinforceLoss: importance_weights = exp(logp_diff).detach(), then clamped).
Heals: nothing to heal. Does not: -
"""

from types import SimpleNamespace

import torch
from torch import nn


class Policy(nn.Module):
    def __init__(self, vocab=21, dim=8):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.rnn = nn.GRU(dim, dim, batch_first=True)
        self.head = nn.Linear(dim, vocab)

    def forward(self, ids):
        return self.head(self.rnn(self.embed(ids))[0])


def compute_logprobs(logits, target_ids):
    return logits.log_softmax(-1).gather(-1, target_ids[..., None]).squeeze(-1)


def reinforce_loss(trainer_logits, target_ids, target_mask, target_weights, sampler_log_probs, low=0.1, high=10.0):
    trainer_log_probs = compute_logprobs(trainer_logits, target_ids)
    logp_diff = trainer_log_probs - sampler_log_probs
    importance_weights = torch.exp(logp_diff).detach()
    importance_weights = torch.clamp(importance_weights, min=low, max=high)
    per_token_loss = -trainer_log_probs * importance_weights * target_weights * target_mask
    return per_token_loss.sum() / target_mask.sum().clamp(min=1)


def build():
    torch.manual_seed(17)
    policy = Policy()
    ids = torch.randint(0, 21, (3, 8))
    mask = torch.ones(3, 7)
    mask[1, 5:] = 0
    with torch.no_grad():
        sampler_log_probs = compute_logprobs(policy(ids[:, :-1]), ids[:, 1:]) + 0.02 * torch.randn(3, 7)
        sampler_log_probs[0, 6] = -120.0
        sampler_log_probs[2, 6] = -300.0
    weights = torch.tensor([0.8, -0.3, -0.5])[:, None].expand(3, 7)
    batch = dict(ids=ids, mask=mask, weights=weights, sampler_log_probs=sampler_log_probs)
    return SimpleNamespace(model=policy, optimizer=torch.optim.AdamW(policy.parameters(), lr=1e-4), batch=batch)


def run(s=None):
    s = s or build()
    b = s.batch
    for _ in range(3):
        logits = s.model(b["ids"][:, :-1])
        loss = reinforce_loss(logits, b["ids"][:, 1:], b["mask"], b["weights"], b["sampler_log_probs"])
        s.optimizer.zero_grad()
        loss.backward()
        s.optimizer.step()
    return float(loss.detach())


if __name__ == "__main__":
    print(run())
