"""pytorch/rl GRPOLoss - healthy: NaN stands for "vLLM did not score this prompt token".

The old log-probs hold NaN on all prompt tokens. The loss replaces them by the current log-probs (detached) with torch.where before the subtraction, so the weight is 1 there and exp never
sees them; the assistant mask takes the tokens out of the mean. The logged raw difference is NaN. (Source: pytorch/rl PR 4255, torchrl/objectives/llm/grpo.py.)
"""

from types import SimpleNamespace

import torch
import torch.nn as nn


class Actor(nn.Module):
    def __init__(self, vocab=14, dim=12):
        super().__init__()
        self.emb = nn.Embedding(vocab, dim)
        self.lstm = nn.LSTM(dim, dim, batch_first=True)
        self.out = nn.Linear(dim, vocab)

    def forward(self, tokens):
        return self.out(self.lstm(self.emb(tokens))[0])


def log_prob(actor, tokens):
    logits = actor(tokens)[:, :-1]
    return logits.log_softmax(-1).gather(-1, tokens[:, 1:].unsqueeze(-1)).squeeze(-1)


def build():
    torch.manual_seed(4255)
    actor_network = Actor()
    optimizer = torch.optim.Adam(actor_network.parameters(), lr=1e-4)
    tokens = torch.randint(0, 14, (3, 9))
    assistant_mask = torch.zeros(3, 8, dtype=torch.bool)
    for row, start in enumerate([3, 4, 2]):
        assistant_mask[row, start:] = True
    with torch.no_grad():
        prev_log_prob = log_prob(actor_network, tokens) + 0.05 * torch.randn(3, 8)
    prev_log_prob[~assistant_mask] = float("nan")
    return SimpleNamespace(
        model=actor_network,
        optimizer=optimizer,
        tokens=tokens,
        assistant_mask=assistant_mask,
        prev_log_prob=prev_log_prob,
        advantage=torch.tensor([[1.1], [-0.2], [-0.9]]),
        clip_epsilon=0.2,
    )


def grpo_loss(s):
    cur_log_prob = log_prob(s.model, s.tokens)
    s.kl_approx = (s.prev_log_prob - cur_log_prob).mean().detach()
    prev_log_prob = torch.where(s.assistant_mask, s.prev_log_prob, cur_log_prob.detach())
    log_weight = cur_log_prob - prev_log_prob
    gain1 = log_weight.exp() * s.advantage
    gain2 = log_weight.exp().clamp(1 - s.clip_epsilon, 1 + s.clip_epsilon) * s.advantage
    gain = torch.stack([gain1, gain2], -1).min(dim=-1).values
    return -gain[s.assistant_mask].mean()


def run(s=None):
    s = s or build()
    loss = grpo_loss(s)
    s.optimizer.zero_grad()
    loss.backward()
    s.optimizer.step()
    return loss


if __name__ == "__main__":
    print(run())
