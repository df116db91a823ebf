"""PyTorch Geometric #795 / #61 - a weighted GCN whose edge weights are correlations.

Symmetric normalisation takes deg ** -0.5 of the weighted degree. Edges that carry negative correlations pull the degree of one node
below zero, the power is NaN, and the guard behind it only looks for inf. One row of the propagated features and with it every weight
of the first layer goes.

Source: https://github.com/pyg-team/pytorch_geometric/issues/795 (and issues/61): "GCNConv can not handle negative edge weights".
Heals: degrees clamped at zero (or from absolute weights), or such edges refused. Does not heal: a small epsilon added to the degree, a
wider guard for -inf.
"""

from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("sqrt_negative",),
    op=("pow",),
    index=(3,),
    masked=False,
    role=("hidden", "attention"),
    fix=("clamp_input", "clamp_denominator", "reject_input", "fix_upstream"),
    variable=("deg_inv_sqrt",),
    line=("deg_inv_sqrt = deg.pow(-0.5)",),
)


def add_remaining_self_loops(edge_index, edge_weight, num_nodes, fill_value=1.0):
    loop = torch.arange(num_nodes)
    edge_index = torch.cat([edge_index, torch.stack([loop, loop])], dim=1)
    return edge_index, torch.cat([edge_weight, torch.full((num_nodes,), fill_value)])


def gcn_norm(edge_index, edge_weight, num_nodes):
    edge_index, edge_weight = add_remaining_self_loops(edge_index, edge_weight, num_nodes)
    row, col = edge_index
    deg = torch.zeros(num_nodes).scatter_add(0, col, edge_weight)
    deg_inv_sqrt = deg.pow(-0.5)
    deg_inv_sqrt[deg_inv_sqrt == float("inf")] = 0
    return edge_index, deg_inv_sqrt[row] * edge_weight * deg_inv_sqrt[col]


class GCNConv(nn.Module):
    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.lin = nn.Linear(in_channels, out_channels, bias=False)
        self.bias = nn.Parameter(torch.zeros(out_channels))

    def forward(self, x, edge_index, edge_weight):
        edge_index, norm = gcn_norm(edge_index, edge_weight, x.size(0))
        row, col = edge_index
        x = self.lin(x)
        out = torch.zeros_like(x).index_add(0, col, norm.view(-1, 1) * x[row])
        return out + self.bias


class Net(nn.Module):
    def __init__(self, in_channels=6, hidden=12, classes=3):
        super().__init__()
        self.conv1 = GCNConv(in_channels, hidden)
        self.conv2 = GCNConv(hidden, classes)

    def forward(self, data):
        x = F.relu(self.conv1(data.x, data.edge_index, data.edge_weight))
        return self.conv2(x, data.edge_index, data.edge_weight)


def build():
    torch.manual_seed(795)
    # correlations between sensors; sensor 3 goes against both of its neighbours
    pairs = [(0, 1, 0.62), (1, 2, 0.41), (2, 4, 0.35), (4, 5, 0.77), (5, 6, 0.28), (6, 0, 0.19), (3, 1, -0.81), (3, 5, -0.74)]
    edges = [(i, j, w) for i, j, w in pairs] + [(j, i, w) for i, j, w in pairs]
    edge_index = torch.tensor([[i for i, _, _ in edges], [j for _, j, _ in edges]])
    edge_weight = torch.tensor([w for _, _, w in edges])
    data = SimpleNamespace(x=torch.randn(7, 6), edge_index=edge_index, edge_weight=edge_weight, y=torch.randint(0, 3, (7,)))
    model = Net()
    return SimpleNamespace(model=model, optimizer=torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=5e-4), data=data)


def run(s=None):
    s = s or build()
    s.optimizer.zero_grad()
    out = s.model(s.data)
    loss = F.cross_entropy(out, s.data.y)
    loss.backward()
    s.optimizer.step()
    return loss


if __name__ == "__main__":
    run()
