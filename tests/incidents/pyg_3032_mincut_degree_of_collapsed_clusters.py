"""PyG #3032 - dense mincut pooling: sqrt of a coarsened degree of 0; the loss is finite and the gradient is NaN.

The raw node attributes of one graph are in the hundreds, so the softmax puts all of its nodes into one cluster, exactly.  The coarsened
adjacency loses its diagonal and is all zero there; d = sqrt(0) + EPS divides 0 to 0 and the forward pass is fine.  The derivative of
the root at 0 is infinite, and it meets a gradient of 0.

Source: https://github.com/pyg-team/pytorch_geometric/issues/3032 ("adding a small constant to the denominator of the cut term" did not
help, "the problem is the degree normalization of the coarsened adjacency").
Heals: a floor under the root.  Tempting and no help: a larger EPS behind the root, an epsilon in the cut term, clipping.
"""

from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F

from expected import Expected

EXPECTED = Expected(
    phase=("backward",),
    cause=("sqrt_zero_grad",),
    op=("sqrt",),
    index=(1, 0),
    masked=None,
    role=("hidden",),
    fix=("clamp_input", "clamp_denominator", "representable_eps", "where_on_detached", "avoid_singular_op", "guard_empty"),
    variable=(None, "d"),
    line=("d = torch.sqrt(d)[:, None] + EPS",),
)

EPS = 1e-15


def trace(x):
    return torch.einsum("ijj->i", x)


def dense_mincut_pool(x, adj, s, mask):
    num_clusters = s.size(-1)
    s = torch.softmax(s, dim=-1)
    mask = mask.unsqueeze(-1).to(x.dtype)
    x, s = x * mask, s * mask

    out = s.transpose(1, 2) @ x
    out_adj = s.transpose(1, 2) @ adj @ s

    mincut_num = trace(out_adj)
    degrees = torch.diag_embed(adj.sum(dim=-1))
    mincut_den = trace(s.transpose(1, 2) @ degrees @ s)
    mincut_loss = -(mincut_num / mincut_den).mean()

    ss = s.transpose(1, 2) @ s
    i_s = torch.eye(num_clusters)
    ortho_loss = torch.norm(ss / torch.norm(ss, dim=(-1, -2), keepdim=True) - i_s / torch.norm(i_s), dim=(-1, -2)).mean()

    out_adj = out_adj * (1 - torch.eye(num_clusters))
    d = out_adj.sum(dim=-1)
    d = torch.sqrt(d)[:, None] + EPS
    out_adj = (out_adj / d) / d.transpose(1, 2)
    return out, out_adj, mincut_loss, ortho_loss


class DenseGraphConv(nn.Module):
    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.lin_rel = nn.Linear(in_channels, out_channels)
        self.lin_root = nn.Linear(in_channels, out_channels, bias=False)

    def forward(self, x, adj):
        return self.lin_rel(adj @ x) + self.lin_root(x)


class Net(nn.Module):
    def __init__(self, in_channels=4, hidden=8, clusters=3, classes=2):
        super().__init__()
        self.pool = nn.Linear(in_channels, clusters)
        self.embed = nn.Linear(in_channels, hidden)
        self.conv = DenseGraphConv(hidden, hidden)
        self.lin = nn.Linear(hidden, classes)

    def forward(self, x, adj, mask):
        s = self.pool(x)
        x, adj, mincut_loss, ortho_loss = dense_mincut_pool(torch.tanh(self.embed(x)), adj, s, mask)
        x = F.relu(self.conv(x, adj))
        return self.lin(x.mean(dim=1)), mincut_loss, ortho_loss


def build():
    torch.manual_seed(3032)
    model = Net()
    adj = (torch.rand(2, 6, 6) < 0.6).float()
    adj = ((adj + adj.transpose(1, 2)) > 0).float() * (1 - torch.eye(6))
    x = torch.randn(2, 6, 4)
    x[1] = torch.tensor([420.0, 15.0, 260.0, 30.0]) + 5.0 * torch.rand(6, 4)  # unscaled attributes
    mask = torch.ones(2, 6, dtype=torch.bool)
    y = torch.tensor([0, 1])
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-4, weight_decay=1e-4)
    return SimpleNamespace(model=model, optimizer=optimizer, x=x, adj=adj, mask=mask, y=y)


def run(s=None):
    s = s or build()
    s.optimizer.zero_grad()
    logits, mincut_loss, ortho_loss = s.model(s.x, s.adj, s.mask)
    loss = F.cross_entropy(logits, s.y) + mincut_loss + ortho_loss
    loss.backward()
    s.optimizer.step()
    return loss


if __name__ == "__main__":
    run()
