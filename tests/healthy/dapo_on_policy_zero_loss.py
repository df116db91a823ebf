"""Token-level DAPO loss on strictly on-policy data: the ratio is 1 everywhere, so the loss is exactly 0 and the gradient is not."""

from types import SimpleNamespace

import torch
from torch import nn

HEALTHY = "the loss is exactly 0.0 at the first step although the policy does learn"


class Policy(nn.Module):
    def __init__(self, vocab=24, width=12):
        super().__init__()
        self.tok = nn.Embedding(vocab, width)
        self.mix = nn.GRU(width, width, batch_first=True)
        self.out = nn.Linear(width, vocab)

    def forward(self, ids):
        return self.out(self.mix(self.tok(ids))[0])


def token_logps(model, ids):
    logits = model(ids[:, :-1])
    return torch.gather(logits.log_softmax(dim=-1), 2, ids[:, 1:].unsqueeze(2)).squeeze(2)


def build():
    torch.manual_seed(101)
    model = Policy()
    ids = torch.randint(0, 24, (4, 9))
    rewards = torch.tensor([1.0, -1.0, -1.0, 1.0])
    return SimpleNamespace(model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=2e-3), ids=ids, rewards=rewards)


def run(s=None, eps_low=0.2, eps_high=0.28):
    s = s or build()
    adv = (s.rewards - s.rewards.mean()) / s.rewards.std(unbiased=False)
    for _ in range(4):
        logps = token_logps(s.model, s.ids)
        ratio = (logps - logps.detach()).exp()
        clipped = ratio.clamp(1 - eps_low, 1 + eps_high)
        loss = -torch.minimum(ratio * adv[:, None], clipped * adv[:, None]).sum() / ratio.numel()
        s.optimizer.zero_grad()
        loss.backward()
        s.optimizer.step()
    return loss
