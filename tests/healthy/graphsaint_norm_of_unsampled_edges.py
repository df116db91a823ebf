"""Healthy. GraphSAINT normalisation counts how often nodes and edges were sampled: never-sampled ones give 0/0 and x/0.

edge_norm = node_count[row] / edge_count: 0/0 of an edge whose source never came is NaN and set to 0.1, x/0 is inf and clamped to 1e4; node counts of 0
are raised to 0.1 before the division. The subgraph that is trained on holds sampled nodes and edges only, so none of the placeholders is used.

Source: https://github.com/pyg-team/pytorch_geometric/blob/master/torch_geometric/loader/graph_saint.py (_compute_norm)
"""

from types import SimpleNamespace

import torch
from torch import nn
from torch.nn import functional as F


class SaintNet(nn.Module):
    def __init__(self, dim: int, classes: int):
        super().__init__()
        self.lin1 = nn.Linear(2 * dim, 16)
        self.lin2 = nn.Linear(32, classes)

    def aggregate(self, x, edge_index, edge_weight):
        row, col = edge_index
        return torch.zeros_like(x).index_add_(0, col, x[row] * edge_weight[:, None])

    def forward(self, x, edge_index, edge_weight):
        h = F.relu(self.lin1(torch.cat([x, self.aggregate(x, edge_index, edge_weight)], dim=1)))
        return self.lin2(torch.cat([h, self.aggregate(h, edge_index, edge_weight)], dim=1))


@torch.no_grad()
def compute_norm(edge_index, n_nodes, samples):
    node_count = torch.zeros(n_nodes)
    edge_count = torch.zeros(edge_index.shape[1])
    for node_idx, edge_idx in samples:
        node_count[node_idx] += 1
        edge_count[edge_idx] += 1
    edge_norm = (node_count[edge_index[0]] / edge_count).clamp_(0, 1e4)
    edge_norm[torch.isnan(edge_norm)] = 0.1
    node_count[node_count == 0] = 0.1
    node_norm = len(samples) / node_count / n_nodes
    return node_norm, edge_norm


def build():
    torch.manual_seed(6)
    n = 30
    edge_index = torch.randint(0, n, (2, 90))
    samples = []
    for _ in range(5):
        nodes = torch.randperm(n - 6)[:12]
        inside = torch.isin(edge_index, nodes).all(dim=0).nonzero()[:, 0]
        samples.append((nodes, inside[torch.rand(len(inside)) < 0.7]))
    degree = torch.bincount(edge_index[1], minlength=n).clamp(min=1).float()
    batch = {
        "x": torch.randn(n, 8),
        "y": torch.randint(0, 3, (n,)),
        "edge_index": edge_index,
        "samples": samples,
        "inverse_degree": 1.0 / degree,
    }
    model = SaintNet(8, 3)
    return SimpleNamespace(model=model, optimizer=torch.optim.Adam(model.parameters(), lr=1e-3), batch=batch)


def run(s=None):
    s = s or build()
    b, losses = s.batch, []
    node_norm, edge_norm = compute_norm(b["edge_index"], len(b["x"]), b["samples"])
    for nodes, edges in b["samples"]:
        edge_index = b["edge_index"][:, edges]
        edge_weight = edge_norm[edges] * b["inverse_degree"][edge_index[1]]
        out = s.model(b["x"], edge_index, edge_weight)
        loss = (F.cross_entropy(out, b["y"], reduction="none") * node_norm)[nodes].sum()
        s.optimizer.zero_grad()
        loss.backward()
        s.optimizer.step()
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    print(run())
