"""prime-rl #2702 - the length-weighted baseline of a group whose rollouts all errored is 0 / 0.

sum(len * reward) / sum(len) has no completion token in that group, so its four advantages are NaN. They are expanded by the number of
completion tokens, and that is 0: no NaN enters the packed micro-batch, loss and gradients are finite and right.
Source: https://github.com/PrimeIntellect-ai/prime-rl/pull/2702
"""

from types import SimpleNamespace

import torch
import torch.nn as nn


class TinyLM(nn.Module):
    def __init__(self, vocab=20, dim=10):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.lm_head = nn.Linear(dim, vocab)

    def forward(self, ids):
        return self.lm_head(torch.tanh(self.embed(ids)))


def compute_advantages(rewards, lengths, coef=0.1, seq_len=16):
    pass_rate = rewards.mean(1, keepdim=True)
    shaped = rewards - coef * pass_rate * lengths / seq_len
    baseline = (lengths * shaped).sum(1, keepdim=True) / lengths.sum(1, keepdim=True)
    return shaped - baseline


def build():
    torch.manual_seed(2702)
    model = TinyLM()
    rewards = torch.tensor([[1.0, 0, 0, 1], [0.0, 0, 0, 0], [0.0, 1, 0, 0]])
    lengths = torch.tensor([[4, 6, 3, 5], [0, 0, 0, 0], [2, 7, 6, 4]])
    total = int(lengths.sum())
    tokens, targets = torch.randint(0, 20, (total,)), torch.randint(0, 20, (total,))
    with torch.no_grad():
        inference = model(tokens).log_softmax(-1).gather(-1, targets[:, None]).squeeze(-1) + 0.02 * torch.randn(total)
    return SimpleNamespace(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-4),
        tokens=tokens,
        targets=targets,
        rewards=rewards,
        lengths=lengths,
        inference_logprobs=inference,
    )


def run(s=None):
    s = s or build()
    s.advantages = compute_advantages(s.rewards, s.lengths)
    token_advantages = torch.repeat_interleave(s.advantages.flatten(), s.lengths.flatten())
    trainer_logprobs = s.model(s.tokens).log_softmax(-1).gather(-1, s.targets[:, None]).squeeze(-1)
    ratio = (trainer_logprobs - s.inference_logprobs).exp()
    loss = -(ratio.clamp(max=8.0) * token_advantages).sum() / token_advantages.numel()
    s.optimizer.zero_grad()
    loss.backward()
    s.optimizer.step()
    return loss


if __name__ == "__main__":
    print(run())
