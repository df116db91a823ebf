"""Healthy. SUBLIME / SLAPS graph structure learning: 1 / (sqrt(degree) + 1e-10) of a node whose learned row is empty, degree 0.

Citeseer has nodes without a single word. Their embedding is 0, so is their cosine similarity to every node, themselves included. The forward holds 1e10
times entries of 0, and the backward of sqrt at 0 makes 0 * inf = NaN for the whole row. But an empty row is one whose entries are all 0, and each of
them stands behind a relu, whose backward writes 0 where its input is not above 0, whatever arrives. Nothing of the NaN reaches a parameter.

Source: utils.py (normalize, EOS = 1e-10; apply_non_linearity "relu") of https://github.com/BorealisAI/SLAPS-GNN and https://github.com/GRAND-Lab/SUBLIME
"""

from types import SimpleNamespace

import torch
from torch import nn
from torch.nn import functional as F


EOS = 1e-10


def top_k(raw_graph, k):
    _, indices = raw_graph.topk(k=k, dim=-1)
    mask = torch.zeros_like(raw_graph)
    mask[torch.arange(raw_graph.shape[0]).view(-1, 1), indices] = 1.0
    return raw_graph * mask


def symmetrize(adj):
    return (adj + adj.T) / 2


def normalize(adj):
    inv_sqrt_degree = 1.0 / (torch.sqrt(adj.sum(dim=1, keepdim=False)) + EOS)
    return inv_sqrt_degree[:, None] * adj * inv_sqrt_degree[None, :]


class ATTLearner(nn.Module):
    """Attentive learner: a weight per feature, twice; cosine similarities; the k nearest; relu."""

    def __init__(self, n_features, k):
        super().__init__()
        self.k = k
        self.w = nn.ParameterList([nn.Parameter(1.0 + 0.1 * torch.randn(n_features)) for _ in range(2)])

    def forward(self, features):
        h = F.relu(features * self.w[0]) * self.w[1]
        embeddings = F.normalize(h, dim=1, p=2)
        similarities = embeddings @ embeddings.t()
        return F.relu(top_k(similarities, self.k + 1))


class SUBLIME(nn.Module):
    def __init__(self, n_features, hidden=16, classes=3, k=3):
        super().__init__()
        self.graph_learner = ATTLearner(n_features, k)
        self.conv1 = nn.Linear(n_features, hidden)
        self.conv2 = nn.Linear(hidden, classes)

    def forward(self, features):
        adj = normalize(symmetrize(self.graph_learner(features)))
        x = F.relu(adj @ self.conv1(features))
        return adj @ self.conv2(x)


def build():
    torch.manual_seed(15)
    n, d = 14, 20
    features = (torch.rand(n, d) < 0.25).float()
    features[6] = 0.0  # an article without any word of the dictionary
    model = SUBLIME(d)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    return SimpleNamespace(model=model, optimizer=optimizer, batch={"features": features, "labels": torch.randint(0, 3, (n,))})


def run(s=None):
    s = s or build()
    losses = []
    for _ in range(2):
        loss = F.cross_entropy(s.model(s.batch["features"]), s.batch["labels"])
        s.optimizer.zero_grad()
        loss.backward()
        s.optimizer.step()
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    print(run())
