"""PyTorch Geometric, gcn_norm without self-loops - isolated nodes have the inverse root inf, which is filled with 0.

The degree of an isolated node is 0 and 0 ** -0.5 is inf. It is replaced by 0, the degrees carry no gradient (they are counts of a fixed
graph), and no edge reads the value anyway. Weights and gradients are finite and right.

Source: https://github.com/pyg-team/pytorch_geometric/blob/master/torch_geometric/nn/conv/gcn_conv.py (gcn_norm)
"""

from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F


def gcn_norm(edge_index, num_nodes):
    row, col = edge_index
    edge_weight = torch.ones(edge_index.size(1))
    deg = torch.zeros(num_nodes).scatter_add(0, col, edge_weight)
    deg_inv_sqrt = deg.pow_(-0.5)
    deg_inv_sqrt.masked_fill_(deg_inv_sqrt == float("inf"), 0)
    return deg_inv_sqrt[row] * edge_weight * deg_inv_sqrt[col]


class GCNConv(nn.Module):
    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.lin = nn.Linear(in_channels, out_channels, bias=False)
        self.bias = nn.Parameter(torch.zeros(out_channels))

    def forward(self, x, edge_index):
        norm = gcn_norm(edge_index, x.size(0))
        row, col = edge_index
        x = self.lin(x)
        out = torch.zeros_like(x).index_add(0, col, norm.view(-1, 1) * x[row])
        return out + self.bias


class GCN(nn.Module):
    def __init__(self, in_channels=5, hidden=8, classes=3):
        super().__init__()
        self.conv1 = GCNConv(in_channels, hidden)
        self.conv2 = GCNConv(hidden, classes)

    def forward(self, x, edge_index):
        return self.conv2(F.relu(self.conv1(x, edge_index)), edge_index)


def build():
    torch.manual_seed(1609)
    edge_index = torch.tensor([[0, 1, 1, 2, 2, 4, 4, 5], [1, 0, 2, 1, 4, 2, 5, 4]])  # nodes 3 and 6 are isolated
    model = GCN()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=5e-4)
    return SimpleNamespace(
        model=model,
        optimizer=optimizer,
        x=torch.randn(7, 5),
        edge_index=edge_index,
        y=torch.randint(0, 3, (7,)),
        train_mask=torch.tensor([1, 1, 0, 1, 1, 0, 1]).bool(),
    )


def run(s=None):
    s = s or build()
    for _ in range(2):
        s.optimizer.zero_grad()
        out = s.model(s.x, s.edge_index)
        loss = F.cross_entropy(out[s.train_mask], s.y[s.train_mask])
        loss.backward()
        s.optimizer.step()
    return loss


if __name__ == "__main__":
    run()
