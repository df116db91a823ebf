"""A rollout sampler by the Gumbel trick, then REINFORCE on its samples: many infinities, none of them ever reaches the loss.

Top-k writes -inf into the logits that must not be drawn; a uniform draw of exactly 0 gives -log(-log(0)) = -inf for one candidate. argmax
simply never takes these. The loss uses the unfiltered log-probs of the drawn tokens, so loss, gradients and weights are finite.
Source: the Gumbel-max / exponential-race samplers of LLM rollout engines (gpt-fast generate.py, vLLM sampler), used by SkyRL and slime.
"""

from types import SimpleNamespace

import torch
import torch.nn as nn


class TinyLM(nn.Module):
    def __init__(self, vocab=16, dim=12):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.head = nn.Linear(dim, vocab)

    def forward(self, ids):
        return self.head(torch.tanh(self.embed(ids)))


def top_k_filter(logits, k):
    kept = logits.topk(k, dim=-1).values[..., -1:]
    return logits.masked_fill(logits < kept, float("-inf"))


@torch.no_grad()
def sample(model, prompts, uniforms, k=5):
    ids = prompts
    for noise in uniforms:
        logits = top_k_filter(model(ids[:, -1]), k)
        gumbel = -torch.log(-torch.log(noise))
        ids = torch.cat([ids, (logits + gumbel).argmax(-1, keepdim=True)], dim=1)
    return ids


def build():
    torch.manual_seed(43)
    model = TinyLM()
    uniforms = torch.rand(6, 4, 16)
    uniforms[1, 2, 9] = 0.0
    uniforms[4, 0, 3] = 0.0
    return SimpleNamespace(
        model=model, prompts=torch.randint(0, 16, (4, 3)), uniforms=uniforms, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3)
    )


def run(s=None):
    s = s or build()
    ids = sample(s.model, s.prompts, s.uniforms)
    rewards = (ids[:, 3:] % 2 == 0).float().mean(-1)
    advantages = (rewards - rewards.mean()).unsqueeze(1)
    logps = s.model(ids[:, 2:-1]).log_softmax(-1).gather(-1, ids[:, 3:].unsqueeze(-1)).squeeze(-1)
    loss = -(advantages * logps).mean()
    s.optimizer.zero_grad()
    loss.backward()
    s.optimizer.step()
    return loss


if __name__ == "__main__":
    print(run())
