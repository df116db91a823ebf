"""Healthy. Glow-TTS / VITS monotonic alignment search: the dynamic programme runs on a table that is -inf almost everywhere.

A text position cannot be reached before as many frames have gone by, so those cells are -inf, and so is the cell left of the first column. The
search only takes maxima and compares; it ends in a 0/1 path. The loss is the Gaussian negative log-likelihood of the frames under the path, and
the finite log-likelihoods are used for it, never the table.

Source: https://github.com/jaywalnut310/glow-tts/blob/master/commons.py (maximum_path, max_neg_val=-np.inf)
"""

import math
from types import SimpleNamespace

import torch
from torch import nn

NEG = float("-inf")


@torch.no_grad()
def maximum_path(value, x_lengths, y_lengths):
    """value: (batch, text, frames) of log-likelihoods; the best monotonic path as a 0/1 tensor."""
    batch, t_x, t_y = value.shape
    direction = torch.zeros(batch, t_x, t_y, dtype=torch.long)
    v = torch.full((batch, t_x), NEG)
    rows = torch.arange(t_x)
    for j in range(t_y):
        stay = v
        move = torch.cat([torch.full((batch, 1), NEG if j else 0.0), v[:, :-1]], dim=1)
        direction[:, :, j] = (stay >= move).long()
        best = torch.maximum(stay, move)
        v = torch.where(rows[None, :] <= j, best + value[:, :, j], torch.full_like(best, NEG))
    path = torch.zeros_like(value)
    for i in range(batch):
        index = int(x_lengths[i]) - 1
        for j in reversed(range(int(y_lengths[i]))):
            path[i, index, j] = 1
            if index > 0 and (index == j or direction[i, index, j] == 0):
                index -= 1
    return path


class Prior(nn.Module):
    def __init__(self, vocab: int, mels: int):
        super().__init__()
        self.embed = nn.Embedding(vocab, 16)
        self.proj = nn.Linear(16, 2 * mels)

    def forward(self, text):
        return self.proj(torch.tanh(self.embed(text))).chunk(2, dim=-1)


def build():
    torch.manual_seed(12)
    model = Prior(30, 6)
    batch = {
        "text": torch.randint(0, 30, (3, 7)),
        "x_lengths": torch.tensor([7, 5, 3]),
        "mel": torch.randn(3, 20, 6),
        "y_lengths": torch.tensor([20, 16, 9]),
    }
    return SimpleNamespace(model=model, optimizer=torch.optim.Adam(model.parameters(), lr=2e-3), batch=batch)


def run(s=None):
    s = s or build()
    b, losses = s.batch, []
    for _ in range(3):
        mean, logs = s.model(b["text"])
        z = (b["mel"][:, None] - mean[:, :, None]) * torch.exp(-logs)[:, :, None]
        logp = (-0.5 * math.log(2 * math.pi) - logs[:, :, None] - 0.5 * z * z).sum(dim=-1)
        path = maximum_path(logp.detach(), b["x_lengths"], b["y_lengths"])
        loss = -(logp * path).sum() / b["y_lengths"].sum() / b["mel"].shape[-1]
        s.optimizer.zero_grad()
        loss.backward()
        s.optimizer.step()
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    print(run())
