"""A decoded image patch holds +inf (a divide in the offline resizer); the vision projector spreads it over the whole sample."""

from types import SimpleNamespace

import torch
from torch import nn

from expected import Expected

EXPECTED = Expected(
    phase=("input", "forward"),
    cause=("bad_input",),
    op=("input", "mul", "add", "sub"),
    index=(1, 3, 2),
    masked=None,
    role=("hidden",),
    fix=("drop_invalid_sample", "reject_input", "fix_upstream", "clamp_input"),
    variable=("pixel_values",),
    line=("return self.norm(self.proj(pixel_values - self.centre))",),
)


class VisionTower(nn.Module):
    def __init__(self, patch=6, width=8):
        super().__init__()
        self.register_buffer("centre", torch.full((patch,), 0.45))
        self.proj = nn.Linear(patch, width)
        self.norm = nn.LayerNorm(width)

    def forward(self, pixel_values):
        return self.norm(self.proj(pixel_values - self.centre))


class Vlm(nn.Module):
    def __init__(self, vocab=17, width=8):
        super().__init__()
        self.visual = VisionTower(width=width)
        self.text = nn.Embedding(vocab, width)
        self.lm_head = nn.Linear(width, vocab)

    def forward(self, ids, pixel_values):
        context = self.visual(pixel_values).mean(dim=1, keepdim=True)
        return self.lm_head(torch.relu(self.text(ids) + context))


def build():
    torch.manual_seed(120)
    model = Vlm()
    pixel_values = torch.rand(3, 5, 6)
    pixel_values[1, 3, 2] = torch.inf
    ids = torch.randint(0, 17, (3, 9))
    rewards = torch.tensor([0.0, 1.0, 1.0])
    return SimpleNamespace(model=model, optimizer=torch.optim.Adam(model.parameters(), lr=1e-4), batch=(ids, pixel_values, rewards))


def run(s=None):
    s = s or build()
    ids, pixel_values, rewards = s.batch
    logits = s.model(ids[:, :-1], pixel_values=pixel_values)
    nll = nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none").view(3, -1)
    loss = (nll.mean(dim=1) * (rewards - rewards.mean())).mean()
    loss.backward()
    s.optimizer.step()
    return loss
