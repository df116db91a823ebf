"""Hist2ST PR #7, mean aggregator of the spot graph - a spot whose only neighbour is itself.

GraphSAGE over tissue spots: the identity is taken off the adjacency and each row divided by its number of neighbours. Two spots at the rim have none, their rows are 0 / 0 and
their embeddings and, through the shared weight, all of the model become NaN. (Source: biomed-AI/Hist2ST PR #7 "handle isolated points", gs_block.aggregate.)
Heals: torch.clamp(num_neigh, min=1.0) (the PR); leaving the two spots out of slide and graph; keeping the self loop of just these rows; more neighbours for them when the graph is built.
Does not: an eps in F.normalize, clipping the gradient norm, leaving the spots out of the loss by a product with a mask.
"""

from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import nn

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("zero_div_zero", "empty_mask_mean", "zero_denominator"),
    op=("div",),
    index=(3, 0),
    masked=None,
    role=("hidden", "attention"),
    fix=("clamp_denominator", "guard_empty", "drop_invalid_sample", "fix_upstream", "where_on_detached"),
    variable=("mask",),
    line=("mask = adj.div(num_neigh)",),
)


class gs_block(nn.Module):
    def __init__(self, feature_dim, embed_dim, policy="mean", gcn=False):
        super().__init__()
        self.gcn = gcn
        self.policy = policy
        self.weight = nn.Parameter(torch.empty(embed_dim, feature_dim if gcn else 2 * feature_dim))
        nn.init.xavier_uniform_(self.weight)

    def forward(self, x, Adj):
        neigh_feats = self.aggregate(x, Adj)
        if not self.gcn:
            combined = torch.cat([x, neigh_feats], dim=1)
        else:
            combined = neigh_feats
        combined = F.relu(self.weight.mm(combined.T)).T
        combined = F.normalize(combined, 2, 1)
        return combined

    def aggregate(self, x, Adj):
        adj = Adj
        if not self.gcn:
            adj = adj - torch.eye(len(adj))
        if self.policy == "mean":
            num_neigh = adj.sum(1, keepdim=True)
            mask = adj.div(num_neigh)
            to_feats = mask.mm(x)
        else:
            raise NotImplementedError(self.policy)
        return to_feats


class Hist2ST(nn.Module):
    def __init__(self, patch_dim=8, dim=10, n_genes=4):
        super().__init__()
        self.patch_embedding = nn.Linear(patch_dim, dim)
        self.gnn = gs_block(dim, dim)
        self.gene_head = nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, n_genes))

    def forward(self, patches, adj):
        return self.gene_head(self.gnn(self.patch_embedding(patches), adj))


def calc_adj(coord, radius):
    return (torch.cdist(coord, coord) <= radius).float()


def build():
    torch.manual_seed(5)
    coord = torch.tensor([[0, 0], [0, 1], [1, 0], [9, 9], [1, 1], [4, 9], [2, 1]], dtype=torch.float)
    model = Hist2ST()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    return SimpleNamespace(model=model, optimizer=optimizer, patches=torch.randn(7, 8), adj=calc_adj(coord, 1.5), exp=torch.rand(7, 4))


def run(s=None):
    s = s or build()
    pred = s.model(s.patches, s.adj)
    loss = F.mse_loss(pred, s.exp)
    s.optimizer.zero_grad()
    loss.backward()
    s.optimizer.step()
    return loss


if __name__ == "__main__":
    print(run())
