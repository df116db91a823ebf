"""bfloat16 autocast around the forward, the loss in float32; rounding leaves ratios that are not quite 1."""

from types import SimpleNamespace

import torch
from torch import nn

HEALTHY = "bfloat16 activations with three significant digits, logits of size 30 and ratios that wobble by rounding"


class Head(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(25, 16)
        self.norm = nn.LayerNorm(16)
        self.up = nn.Linear(16, 48)
        self.lm_head = nn.Linear(48, 25)

    def forward(self, ids):
        return self.lm_head(torch.relu(self.up(self.norm(self.emb(ids))))) * 40


def build():
    torch.manual_seed(116)
    model = Head()
    ids = torch.randint(0, 25, (2, 13))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    return SimpleNamespace(model=model, optimizer=optimizer, ids=ids, adv=torch.tensor([[0.5], [-0.5]]))


def run(s=None):
    s = s or build()
    with torch.no_grad():
        old = s.model(s.ids[:, :-1]).log_softmax(-1).gather(-1, s.ids[:, 1:, None]).squeeze(-1)
    for _ in range(4):
        with torch.autocast(device_type="cpu", dtype=torch.bfloat16):
            logits = s.model(s.ids[:, :-1])
        logp = logits.float().log_softmax(-1).gather(-1, s.ids[:, 1:, None]).squeeze(-1)
        log_ratio = (logp - old).clamp(-10, 10)
        ratio = log_ratio.exp()
        loss = torch.max(-s.adv * ratio, -s.adv * ratio.clamp(0.8, 1.2)).mean()
        s.optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(s.model.parameters(), 1.0)
        s.optimizer.step()
    return loss
