"""LightGCN: a user without purchases and an unsold item have degree 0, whose inverse root is inf. Healthy.

The inf of the isolated nodes is overwritten by 0 before the adjacency is scaled, as the sources do in scipy; the matrix holds no gradient. Their
propagated embedding is 0 and only the layer-0 embedding is left in the mean. The BPR loss is the softplus of a score difference, finite anywhere.
Source: https://github.com/gusye1234/LightGCN-PyTorch/blob/master/code/dataloader.py (getSparseGraph: d_inv[np.isinf(d_inv)] = 0.), model.py bpr_loss.
Heals: nothing to heal. Does not: -
"""

from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import nn


class LightGCN(nn.Module):
    def __init__(self, n_users=5, m_items=6, latent_dim=4, n_layers=3):
        super().__init__()
        self.n_users, self.m_items, self.n_layers = n_users, m_items, n_layers
        self.embedding_user = nn.Embedding(n_users, latent_dim)
        self.embedding_item = nn.Embedding(m_items, latent_dim)
        nn.init.normal_(self.embedding_user.weight, std=0.1)
        nn.init.normal_(self.embedding_item.weight, std=0.1)

    def get_graph(self, train_user, train_item):
        n = self.n_users + self.m_items
        adj_mat = torch.zeros(n, n)
        adj_mat[train_user, self.n_users + train_item] = 1.0
        adj_mat = adj_mat + adj_mat.T
        rowsum = adj_mat.sum(dim=1)
        d_inv = torch.pow(rowsum, -0.5)
        d_inv[torch.isinf(d_inv)] = 0.0
        return d_inv[:, None] * adj_mat * d_inv[None, :]

    def computer(self, graph):
        all_emb = torch.cat([self.embedding_user.weight, self.embedding_item.weight])
        embs = [all_emb]
        for _ in range(self.n_layers):
            all_emb = graph @ all_emb
            embs.append(all_emb)
        light_out = torch.stack(embs, dim=1).mean(dim=1)
        return torch.split(light_out, [self.n_users, self.m_items])

    def bpr_loss(self, graph, users, pos, neg):
        all_users, all_items = self.computer(graph)
        pos_scores = (all_users[users] * all_items[pos]).sum(dim=1)
        neg_scores = (all_users[users] * all_items[neg]).sum(dim=1)
        return F.softplus(neg_scores - pos_scores).mean()


def build():
    torch.manual_seed(20)
    model = LightGCN()
    batch = dict(
        train_user=torch.tensor([0, 0, 1, 2, 4, 4]),  # user 3 is new, items 4 and 5 were never sold
        train_item=torch.tensor([0, 1, 1, 3, 2, 3]),
        users=torch.tensor([0, 1, 2, 4]),
        pos=torch.tensor([1, 1, 3, 2]),
        neg=torch.tensor([4, 0, 5, 4]),
    )
    return SimpleNamespace(model=model, optimizer=torch.optim.Adam(model.parameters(), lr=1e-2), batch=batch)


def run(s=None):
    s = s or build()
    b = s.batch
    for _ in range(3):
        graph = s.model.get_graph(b["train_user"], b["train_item"])
        loss = s.model.bpr_loss(graph, b["users"], b["pos"], b["neg"])
        s.optimizer.zero_grad()
        loss.backward()
        s.optimizer.step()
    return float(loss.detach())


if __name__ == "__main__":
    print(run())
