"""triplet-loss-pytorch #3, semi-hard triplet loss - a batch in which no identity occurs twice.

The triplets are averaged over the number of positive pairs. With many identities and a small batch there is sometimes no pair at all: the sum is zero, the number too, the loss 0 / 0 and
the gradient inf * 0. (Source: alfonmedela/triplet-loss-pytorch issue #3, loss_functions/triplet_loss.py.) Heals: num_positives.clamp(min=1.0); returning embeddings.sum() * 0 without pairs;
a sampler that puts two images of each identity into the batch; an eps of 1e-8 in the denominator; skipping the batch. Does not: the "trivial bias" of the thread on the distances, clipping the gradient norm,
normalised embeddings (they are).
"""

from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import nn

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("empty_mask_mean", "zero_div_zero"),
    op=("div", "truediv"),
    index=(),
    masked=None,
    role=("loss",),
    fix=("clamp_denominator", "guard_empty", "skip_bad_step", "fix_upstream"),
    variable=("triplet_loss", "loss"),
    line=("triplet_loss = (torch.max(torch.mul(loss_mat, mask_positives), torch.tensor([0.0]))).sum() / num_positives",),
)


def pairwise_distance_torch(embeddings):
    precise_embeddings = embeddings.to(dtype=torch.float32)
    c1 = torch.pow(precise_embeddings, 2).sum(dim=-1).reshape(-1, 1)
    c2 = torch.pow(precise_embeddings.transpose(0, 1), 2).sum(dim=0).reshape(1, -1)
    c3 = precise_embeddings @ precise_embeddings.transpose(0, 1)
    pairwise_distances_squared = c1 + c2 - 2.0 * c3
    pairwise_distances_squared = torch.max(pairwise_distances_squared, torch.tensor([0.0]))
    error_mask = (pairwise_distances_squared != 0.0).float()
    pairwise_distances = torch.mul(pairwise_distances_squared, error_mask)
    mask_offdiagonals = 1.0 - torch.eye(len(embeddings))
    return torch.mul(pairwise_distances, mask_offdiagonals)


def TripletSemiHardLoss(y_true, y_pred, margin=1.0):
    labels, embeddings = y_true.reshape(-1, 1), y_pred
    pdist_matrix = pairwise_distance_torch(embeddings)
    adjacency = torch.eq(labels, labels.transpose(0, 1))
    adjacency_not = adjacency.logical_not()
    batch_size = labels.shape[0]

    pdist_matrix_tile = pdist_matrix.repeat(batch_size, 1)
    adjacency_not_tile = adjacency_not.repeat(batch_size, 1)
    transpose_reshape = pdist_matrix.transpose(0, 1).reshape(-1, 1)
    mask = adjacency_not_tile & (pdist_matrix_tile > transpose_reshape)
    mask_final = (mask.float().sum(dim=1) > 0.0).reshape(batch_size, batch_size).transpose(0, 1)
    adjacency_not = adjacency_not.to(dtype=torch.float32)
    mask = mask.to(dtype=torch.float32)

    axis_maximums = torch.max(pdist_matrix_tile, dim=1, keepdim=True)
    masked_minimums = torch.min(torch.mul(pdist_matrix_tile - axis_maximums[0], mask), dim=1, keepdim=True)[0] + axis_maximums[0]
    negatives_outside = masked_minimums.reshape([batch_size, batch_size]).transpose(0, 1)
    axis_minimums = torch.min(pdist_matrix, dim=1, keepdim=True)
    masked_maximums = torch.max(torch.mul(pdist_matrix - axis_minimums[0], adjacency_not), dim=1, keepdim=True)[0] + axis_minimums[0]
    negatives_inside = masked_maximums.repeat(1, batch_size)
    semi_hard_negatives = torch.where(mask_final, negatives_outside, negatives_inside)

    loss_mat = margin + pdist_matrix - semi_hard_negatives
    mask_positives = adjacency.to(dtype=torch.float32) - torch.eye(batch_size)
    num_positives = mask_positives.sum()
    triplet_loss = (torch.max(torch.mul(loss_mat, mask_positives), torch.tensor([0.0]))).sum() / num_positives
    return triplet_loss.to(dtype=embeddings.dtype)


class EmbeddingNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(10, 16), nn.ReLU(), nn.Linear(16, 6))

    def forward(self, x):
        return F.normalize(self.backbone(x), dim=1)


def build():
    torch.manual_seed(17)
    model = EmbeddingNet()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    identities = [torch.tensor([3, 8, 3, 41, 8, 12]), torch.tensor([5, 19, 2, 33, 27, 40])]
    loader = [(torch.randn(6, 10), y) for y in identities]
    return SimpleNamespace(model=model, optimizer=optimizer, loader=loader)


def run(s=None):
    s = s or build()
    for images, targets in s.loader:
        s.optimizer.zero_grad()
        loss = TripletSemiHardLoss(targets, s.model(images))
        loss.backward()
        s.optimizer.step()
    return loss


if __name__ == "__main__":
    print(run())
