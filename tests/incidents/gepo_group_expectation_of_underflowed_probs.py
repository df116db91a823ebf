"""GEPO (group expectation policy optimisation): the importance weight divides by the group's expected probability, and that has underflowed.

GEPO replaces q(y) in p(y) / q(y) by its expectation over the group, E_q[q] = sum(q^2) / sum(q), computed with probabilities of whole responses. A
response of 64 tokens at 1.8 nats each has probability exp(-115), which is 0 in float32. For the second prompt all four responses are of that length,
so the normalised q is 0 / 0 = NaN before the weight itself is formed. The short answers of the first prompt are fine.
Source: https://github.com/yelurebajrang/HeteroRL_GEPO (README, "Group-level importance ratio": normalized_q and coef_1).
Heals: stay in logs: log E = logsumexp(2 log q) - logsumexp(log q), coef = exp(log p - log E).
Does not: an eps under the sum (the weight becomes 0 / 0 one line later, or 0 and the prompt teaches nothing), clamping coef_1, clipping the norm.
"""

from types import SimpleNamespace

import torch
from torch import nn

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("zero_div_zero",),
    op=("div",),
    index=(1, 0),
    masked=False,
    role=("is_weight", "hidden", "ratio"),
    fix=("stable_function",),
    variable=("normalized_q",),
    line=("normalized_q = sampler_seq_p / sampler_seq_p.sum(dim=-1, keepdim=True)",),
)

G = 4


class Policy(nn.Module):
    def __init__(self, vocab=12, dim=24):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.lstm = nn.LSTM(dim, dim, batch_first=True)
        self.head = nn.Linear(dim, vocab)

    def forward(self, ids):
        return self.head(self.lstm(self.embed(ids))[0])


def sequence_logps(model, ids, mask):
    logps = model(ids[:, :-1]).log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)
    return (logps * mask).sum(-1)


def gepo_coef(learner_seq_logp, sampler_seq_logp):
    learner_seq_p = learner_seq_logp.exp()
    sampler_seq_p = sampler_seq_logp.exp()
    normalized_q = sampler_seq_p / sampler_seq_p.sum(dim=-1, keepdim=True)
    return learner_seq_p / (normalized_q * sampler_seq_p).sum(dim=-1, keepdim=True)


def group_advantages(rewards):
    rewards = rewards.view(-1, G)
    return (rewards - rewards.mean(-1, keepdim=True)) / (rewards.std(-1, keepdim=True) + 1e-4)


def build():
    torch.manual_seed(17)
    policy = Policy()
    ids = torch.randint(1, 12, (2 * G, 65))
    lengths = torch.tensor([5, 7, 4, 6, 64, 64, 64, 63])
    mask = (torch.arange(64)[None] < lengths[:, None]).float()
    with torch.no_grad():  # the sampler runs with weights of half an hour ago
        sampler_logp = sequence_logps(policy, ids, mask) + 0.3 * torch.randn(2 * G)
    rewards = torch.tensor([1.0, 0.0, 0.0, 1.0, 0.0, 1.0, 0.0, 0.0])
    optimizer = torch.optim.AdamW(policy.parameters(), lr=5e-5)
    return SimpleNamespace(model=policy, optimizer=optimizer, batch=dict(ids=ids, mask=mask, sampler_logp=sampler_logp, rewards=rewards))


def run(s=None, cliprange=0.2):
    s = s or build()
    b = s.batch
    advantages = group_advantages(b["rewards"])
    learner_logp = sequence_logps(s.model, b["ids"], b["mask"]).view(-1, G)
    coef_1 = gepo_coef(learner_logp, b["sampler_logp"].view(-1, G))
    coef_2 = coef_1.clamp(1 - cliprange, 1 + cliprange)
    loss = -torch.min(coef_1 * advantages, coef_2 * advantages).mean()
    s.optimizer.zero_grad()
    loss.backward()
    s.optimizer.step()
    return loss.item()


if __name__ == "__main__":
    print(run())
