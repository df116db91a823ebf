"""RetNet in its parallel form: the decay gamma ** (n - m) is taken for all pairs and then multiplied by the causal mask. Looks broken, is healthy.

Above the diagonal the exponent is negative: with 760 positions and gamma = 0.875 the power is inf, and inf * 0 leaves thousands of NaN in the matrix.
They are all above the diagonal and are set to 0 in place before anything reads the matrix, which needs no gradient. Loss and gradients are those of a
mask that was made without them.
Source: https://github.com/Jamie-Stirling/RetNet/blob/main/src/retention.py (_get_D: "this results in some NaN when n is much larger than m", `D[D != D] = 0`)
"""

from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import nn


class SimpleRetention(nn.Module):
    def __init__(self, hidden_size, gamma, head_size):
        super().__init__()
        self.gamma = gamma
        self.W_Q = nn.Parameter(torch.randn(hidden_size, head_size) / hidden_size)
        self.W_K = nn.Parameter(torch.randn(hidden_size, head_size) / hidden_size)
        self.W_V = nn.Parameter(torch.randn(hidden_size, head_size) / hidden_size)

    def _get_D(self, sequence_length):
        n = torch.arange(sequence_length).unsqueeze(1)
        m = torch.arange(sequence_length).unsqueeze(0)
        D = (self.gamma ** (n - m)) * (n >= m).float()
        D[D != D] = 0
        return D

    def forward(self, X):
        D = self._get_D(X.shape[1])
        Q, K, V = X @ self.W_Q, X @ self.W_K, X @ self.W_V
        return (Q @ K.transpose(1, 2) * D.unsqueeze(0)) @ V


class RetNetLM(nn.Module):
    def __init__(self, vocab=32, width=16, heads=2):
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        gammas = [0.875, 0.96875]
        self.retentions = nn.ModuleList(SimpleRetention(width, gamma, width // heads) for gamma in gammas)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab)

    def forward(self, ids):
        x = self.embed(ids)
        return self.head(self.norm(x + torch.cat([r(x) for r in self.retentions], dim=2)))


def build():
    torch.manual_seed(0)
    model = RetNetLM()
    ids = torch.randint(0, 32, (2, 761))
    return SimpleNamespace(model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=3e-3), batch={"ids": ids})


def run(s=None):
    s = s or build()
    ids = s.batch["ids"]
    losses = []
    for _ in range(3):
        logits = s.model(ids[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        s.optimizer.zero_grad()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(s.model.parameters(), 1.0)
        s.optimizer.step()
        losses.append(loss.item())
    return {"losses": losses, "grad_norm": norm.item(), "weights_finite": all(p.isfinite().all().item() for p in s.model.parameters())}


if __name__ == "__main__":
    print(run())
