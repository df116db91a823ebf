"""GCN on a correlation graph: edge weights are signed, a node's weighted degree is negative, and deg ** -0.5 is NaN.

gcn_norm expects inf of isolated nodes and writes 0 over it. A node whose negative correlations outweigh the positive ones (and its self-loop) has a
negative degree; its inverse root is NaN, which the comparison with inf lets through, and it reaches the output of all its neighbours.
Source: https://github.com/pyg-team/pytorch_geometric/issues/61 ("In the third line, I get nans rather than inf. They are not corrected and propagated").
Heals: clamping the degree at 0 (its inf is then zeroed), refusing or mapping negative weights, writing 0 over NaN too.
Does not: comparing with inf, adding a small eps to the degree, clipping gradients.
"""

from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import nn

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("sqrt_negative",),
    op=("pow",),
    index=(3,),
    masked=False,
    role=("hidden",),
    fix=("clamp_input", "reject_input", "fix_upstream", "where_on_detached", "mask_before_op"),
    variable=("deg_inv_sqrt",),
    line=("deg_inv_sqrt = deg.pow(-0.5)",),
)


def gcn_norm(edge_index, edge_weight, num_nodes):
    row, col = edge_index
    deg = torch.zeros(num_nodes).scatter_add_(0, col, edge_weight)
    deg_inv_sqrt = deg.pow(-0.5)
    deg_inv_sqrt.masked_fill_(deg_inv_sqrt == float("inf"), 0.0)
    return deg_inv_sqrt[row] * edge_weight * deg_inv_sqrt[col]


class GCN(nn.Module):
    def __init__(self, in_dim=4, hidden=8, classes=2):
        super().__init__()
        self.lin1 = nn.Linear(in_dim, hidden)
        self.lin2 = nn.Linear(hidden, classes)

    def propagate(self, x, edge_index, norm):
        row, col = edge_index
        return torch.zeros_like(x).index_add_(0, col, norm[:, None] * x[row])

    def forward(self, x, edge_index, edge_weight):
        norm = gcn_norm(edge_index, edge_weight, x.shape[0])
        x = F.relu(self.propagate(self.lin1(x), edge_index, norm))
        return self.propagate(self.lin2(x), edge_index, norm)


def build():
    torch.manual_seed(61)
    pairs = [(0, 1, 0.8), (1, 2, 0.6), (2, 3, -0.9), (3, 4, -0.7), (0, 4, 0.5), (4, 5, 0.9)]
    src = [a for a, b, w in pairs] + [b for a, b, w in pairs] + list(range(6))
    dst = [b for a, b, w in pairs] + [a for a, b, w in pairs] + list(range(6))
    weight = [w for a, b, w in pairs] * 2 + [1.0] * 6
    model = GCN()
    batch = dict(
        x=torch.randn(7, 4),  # node 6 has no edge at all, not even its self-loop
        edge_index=torch.tensor([src, dst]),
        edge_weight=torch.tensor(weight),
        y=torch.tensor([0, 1, 0, 1, 1, 0, 0]),
        train_mask=torch.tensor([True, True, False, False, True, True, False]),
    )
    return SimpleNamespace(model=model, optimizer=torch.optim.Adam(model.parameters(), lr=1e-2), batch=batch)


def run(s=None):
    s = s or build()
    b = s.batch
    for _ in range(2):
        s.optimizer.zero_grad()
        logits = s.model(b["x"], b["edge_index"], b["edge_weight"])
        loss = F.cross_entropy(logits[b["train_mask"]], b["y"][b["train_mask"]])
        loss.backward()
        s.optimizer.step()
    return float(loss.detach())


if __name__ == "__main__":
    print(run())
