"""Soft-prompt optimisation against a frozen fp16 language model: the prompt takes over the model's dtype, Adam its own.

The gradients are of the order 1e-4 and smaller, their squares are 0 in fp16 and so is eps = 1e-8. The first update divides
by sqrt(0) + 0: the prompt is +-inf after one step, the next loss NaN. Loss and gradients of the first step are finite.
Source: https://github.com/matanbt/TROPT/pull/8
Heals: a float32 master copy of the prompt; an eps that fp16 holds (1e-4).
Does not: gradient clipping; a smaller lr; bounding the loss.
"""

from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import nn

from expected import Expected

EXPECTED = Expected(
    phase=("optimizer",),
    cause=("eps_underflow", "zero_denominator"),
    op=("addcdiv", "div"),
    index=(0, 0, 0),
    masked=None,
    role=("optimizer", "weights"),
    fix=("upcast_fp32", "representable_eps", "clamp_denominator"),
    variable=("trigger_emb", None),
    line=("s.optimizer.step()",),
)


class HalfLM(nn.Module):
    def __init__(self, vocab=40, dim=16):
        super().__init__()
        self.embeddings = nn.Embedding(vocab, dim)
        self.up = nn.Linear(dim, 2 * dim)
        self.down = nn.Linear(2 * dim, dim)
        self.lm_head = nn.Linear(dim, vocab, bias=False)

    def forward(self, embs):
        hidden = embs + self.down(torch.tanh(self.up(embs))) + 0.05 * embs.mean(1, keepdim=True)
        return self.lm_head(hidden)


class SoftPrompt(nn.Module):
    def __init__(self, trigger_emb):
        super().__init__()
        self.trigger_emb = nn.Parameter(trigger_emb)

    def forward(self, target_embs):
        return torch.cat([self.trigger_emb.expand(target_embs.size(0), -1, -1), target_embs], dim=1)


def build():
    torch.manual_seed(19)
    lm = HalfLM().half().requires_grad_(False)
    target_ids = torch.randint(0, 40, (2, 6))
    start = lm.embeddings(torch.randint(0, 40, (1, 4))).clone()
    model = SoftPrompt(start)
    return SimpleNamespace(model=model, lm=lm, batch=dict(target_ids=target_ids), optimizer=torch.optim.Adam(model.parameters(), lr=0.01))


def run(s=None, steps=2):
    s = s or build()
    ids = s.batch["target_ids"]
    losses = []
    for _ in range(steps):
        s.optimizer.zero_grad()
        logits = s.lm(s.model(s.lm.embeddings(ids)))
        target_logits = logits[:, -ids.size(1) - 1 : -1].float()
        loss = F.cross_entropy(target_logits.flatten(0, 1), ids.flatten()) * 0.01
        loss.backward()
        s.optimizer.step()
        losses.append(loss.item())
    return losses, s.model.trigger_emb.isfinite().all().item()


if __name__ == "__main__":
    print(run())
