"""Looks broken, is healthy: the z-score of a gradient norm is NaN while the window holds one norm only.

An adaptive clipper in the manner of ZClip keeps the gradient norms seen so far and scales the gradients down if the newest norm is a spike. In the
first step the window has one element: its std is NaN, so is the score, and NaN > threshold is False, so nothing is clipped. In the second step the
two norms give a finite std. The gradients are never touched by the NaN.

Source: https://github.com/bluorion-com/ZClip
"""

from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F


class SpikeClipper:
    def __init__(self, threshold=2.5, window=50):
        self.threshold, self.window = threshold, window
        self.norms = []
        self.scores = []

    @torch.no_grad()
    def step(self, model):
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(g) for g in grads]))
        self.norms = [*self.norms, norm][-self.window :]
        history = torch.stack(self.norms)
        mean, std = history.mean(), history.std()
        score = (norm - mean) / std
        self.scores.append(score)
        if score > self.threshold:
            limit = mean + self.threshold * std
            for g in grads:
                g.mul_(limit / norm)
        return norm


class LanguageModel(nn.Module):
    def __init__(self, vocab=16, dim=8):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.fc = nn.Linear(dim, 4 * dim)
        self.out = nn.Linear(4 * dim, vocab)

    def forward(self, ids):
        return self.out(F.gelu(self.fc(self.embed(ids))))


def build():
    torch.manual_seed(2113)
    model = LanguageModel()
    return SimpleNamespace(
        model=model,
        ids=torch.randint(0, 16, (2, 4, 9)),
        clipper=SpikeClipper(),
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3),
    )


def run(s=None):
    s = s or build()
    for ids in s.ids:
        s.optimizer.zero_grad(set_to_none=True)
        logits = s.model(ids[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        s.clipper.step(s.model)
        s.optimizer.step()
    return loss


if __name__ == "__main__":
    print(run())
