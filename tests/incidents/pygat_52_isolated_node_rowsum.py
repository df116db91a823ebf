"""pyGAT - a node without any edge divides 0 by a row sum of 0 in the sparse attention layer.

The preprocessing forgot the self loops, so one citation node has no neighbour: its attention sum is 0 and so is its aggregate, 0 / 0. The
node is not in the training split, so the loss is finite, but the second layer multiplies its NaN feature row with a zero gradient and the
weight of the output layer is lost.
Source: https://github.com/diegoantognini/pyGAT/issues/52 and https://github.com/diegoantognini/pyGAT/issues/11 (sparse GAT, NaN in h_prime)
Heals: self loops, a guard for rows without edges, a floor under the row sum. Does not: nan_to_num on the output of the network, or leaving
the node out of the loss (it is left out already).
"""

from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F

from expected import Expected

EXPECTED = Expected(
    phase=("backward",),
    cause=("zero_div_zero", "where_grad_trap"),
    op=("div",),
    index=(7, 0),
    masked=True,
    role=("attention", "hidden"),
    fix=("guard_empty", "clamp_denominator", "mask_before_op", "safe_softmax", "fix_upstream"),
    variable=("h_prime",),
    line=("h_prime = h_prime.div(e_rowsum)",),
)


class SpGraphAttentionLayer(nn.Module):
    """Attention over an edge list, the softmax written as exp and a sum over the neighbours."""

    def __init__(self, in_features, out_features, alpha=0.2, concat=True):
        super().__init__()
        self.W = nn.Parameter(torch.zeros(in_features, out_features))
        nn.init.xavier_normal_(self.W, gain=1.414)
        self.a = nn.Parameter(torch.zeros(1, 2 * out_features))
        nn.init.xavier_normal_(self.a, gain=1.414)
        self.leakyrelu = nn.LeakyReLU(alpha)
        self.concat = concat

    def forward(self, x, adj):
        n = x.size(0)
        src, dst = adj.nonzero().t()
        h = x @ self.W

        edge_h = torch.cat((h[src], h[dst]), dim=1)
        edge_e = torch.exp(-self.leakyrelu(edge_h @ self.a.t()))

        e_rowsum = torch.zeros(n, 1).index_add(0, src, edge_e)
        h_prime = torch.zeros(n, h.size(1)).index_add(0, src, edge_e * h[dst])
        h_prime = h_prime.div(e_rowsum)

        return F.elu(h_prime) if self.concat else h_prime


class SpGAT(nn.Module):
    def __init__(self, nfeat, nhid, nclass, nheads):
        super().__init__()
        self.attentions = nn.ModuleList(SpGraphAttentionLayer(nfeat, nhid) for _ in range(nheads))
        self.out_att = SpGraphAttentionLayer(nhid * nheads, nclass, concat=False)

    def forward(self, x, adj):
        x = torch.cat([att(x, adj) for att in self.attentions], dim=1)
        x = F.elu(self.out_att(x, adj))
        return F.log_softmax(x, dim=1)


def citation_graph(num_nodes=12, lonely=7):
    """A ring with a few shortcuts. Node 7 is a paper that cites nothing in the corpus and is not cited."""
    adj = torch.zeros(num_nodes, num_nodes)
    others = [i for i in range(num_nodes) if i != lonely]
    for i, j in zip(others, others[1:] + others[:1]):
        adj[i, j] = adj[j, i] = 1
    for i, j in ((0, 5), (2, 9), (3, 11)):
        adj[i, j] = adj[j, i] = 1
    return adj


def build():
    torch.manual_seed(72)
    adj = citation_graph()
    features = torch.rand(12, 10).round()
    labels = torch.randint(0, 3, (12,))
    idx_train = torch.tensor([0, 1, 2, 3, 4, 5])
    model = SpGAT(nfeat=10, nhid=4, nclass=3, nheads=2)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3, weight_decay=5e-4)
    return SimpleNamespace(model=model, optimizer=optimizer, features=features, adj=adj, labels=labels, idx_train=idx_train)


def run(s=None):
    s = s or build()
    s.model.train()
    s.optimizer.zero_grad()
    output = s.model(s.features, s.adj)
    loss_train = F.nll_loss(output[s.idx_train], s.labels[s.idx_train])
    loss_train.backward()
    s.optimizer.step()
    return loss_train


if __name__ == "__main__":
    print(run())
