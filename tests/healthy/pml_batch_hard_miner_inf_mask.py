"""Batch-hard triplet mining with a mask of infinities: distance 0 times inf is NaN, and rows without a partner are inf.

The miner multiplies the distance matrix by a mask that is inf outside the allowed pairs.  The diagonal (distance 0) becomes 0 * inf = NaN, which
the next line turns into inf; a row without any negative would keep inf and be dropped by a_keep_idx.  All of it happens under no_grad on
a copy and only indices leave the miner.  Anchors without a positive are dropped likewise.  The loss and its gradients are finite.  Healthy.

Source: BatchHardMiner of https://github.com/KevinMusgrave/pytorch-metric-learning/blob/master/src/pytorch_metric_learning/miners/batch_hard_miner.py
(get_max_per_row, get_min_per_row).
"""

from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import nn


class BatchHardMiner:
    def __call__(self, embeddings, labels):
        with torch.no_grad():
            return self.mine(embeddings.detach(), labels)

    def mine(self, embeddings, labels):
        mat = (2 - 2 * embeddings @ embeddings.t()).clamp(min=0).sqrt().fill_diagonal_(0.0)
        same = labels[:, None] == labels[None, :]
        positives = same & ~torch.eye(len(labels), dtype=torch.bool)
        negatives = ~same
        (hardest_pos, p), a1p_keep = self.get_max_per_row(mat, positives)
        (hardest_neg, n), a2n_keep = self.get_min_per_row(mat, negatives)
        a_keep_idx = torch.where(a1p_keep & a2n_keep)
        self.hardest_triplet_dist = (hardest_pos - hardest_neg)[a_keep_idx].max().item()
        return torch.arange(len(mat))[a_keep_idx], p[a_keep_idx], n[a_keep_idx]

    @staticmethod
    def get_max_per_row(mat, allowed):
        mask = allowed.float()
        return torch.max(mat * mask, dim=1), mask.any(dim=1)

    @staticmethod
    def get_min_per_row(mat, allowed):
        mask = torch.full_like(mat, float("inf"))
        mask[allowed] = 1
        non_inf_rows = (mask != float("inf")).any(dim=1)
        mat_masked = mat * mask
        mat_masked[torch.isnan(mat_masked) | torch.isinf(mat_masked)] = float("inf")
        return torch.min(mat_masked, dim=1), non_inf_rows


def build():
    torch.manual_seed(29)
    model = nn.Sequential(nn.Linear(14, 24), nn.ReLU(), nn.Linear(24, 8))
    x = torch.randn(10, 14)
    labels = torch.tensor([0, 0, 0, 1, 1, 2, 3, 3, 4, 1])  # 2 and 4 occur once
    return SimpleNamespace(
        model=model,
        optimizer=torch.optim.Adam(model.parameters(), lr=1e-2),
        batch={"x": x, "labels": labels},
        batches=[labels, torch.zeros(10, dtype=torch.long).index_fill(0, torch.tensor([9]), 1), labels],
    )


def run(s=None, margin=0.2):
    s = s or build()
    miner, out = BatchHardMiner(), []
    for labels in s.batches:
        emb = F.normalize(s.model(s.batch["x"]), dim=1)
        a, p, n = miner(emb, labels)
        d_ap = (emb[a] - emb[p]).pow(2).sum(1)
        d_an = (emb[a] - emb[n]).pow(2).sum(1)
        loss = F.relu(d_ap - d_an + margin).mean()
        s.optimizer.zero_grad()
        loss.backward()
        s.optimizer.step()
        out.append(loss.item())
    return out


if __name__ == "__main__":
    print(run())
