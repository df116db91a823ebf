"""allegro/allRank, lambdaLoss - padded documents have the score -inf and their differences are NaN, and none of it counts.

Scores and labels of padding are set to -inf, so the matrix of pairwise differences holds NaN and infinities. The NaN are set to 0 in
place, the rest is clamped, and only pairs of real documents are selected. The padded scores were written over, so no gradient meets them.

Source: https://github.com/allegro/allRank/blob/master/allrank/models/losses/lambdaLoss.py
"""

from types import SimpleNamespace

import torch
import torch.nn as nn

PADDED_Y_VALUE = -1


def lambda_loss(y_pred, y_true, eps=1e-10, padded_value_indicator=PADDED_Y_VALUE, k=None, sigma=1.0):
    y_pred = y_pred.clone()
    y_true = y_true.clone()
    padded_mask = y_true == padded_value_indicator
    y_pred[padded_mask] = float("-inf")
    y_true[padded_mask] = float("-inf")

    y_pred_sorted, indices_pred = y_pred.sort(descending=True, dim=-1)
    y_true_sorted, _ = y_true.sort(descending=True, dim=-1)
    true_sorted_by_preds = torch.gather(y_true, dim=1, index=indices_pred)
    true_diffs = true_sorted_by_preds[:, :, None] - true_sorted_by_preds[:, None, :]
    padded_pairs_mask = torch.isfinite(true_diffs) & (true_diffs > 0)

    true_sorted_by_preds.clamp_(min=0.0)
    y_true_sorted.clamp_(min=0.0)
    pos_idxs = torch.arange(1, y_pred.shape[1] + 1)
    D = torch.log2(1.0 + pos_idxs.float())[None, :]
    maxDCGs = torch.sum((torch.pow(2, y_true_sorted) - 1) / D, dim=-1).clamp(min=eps)
    G = (torch.pow(2, true_sorted_by_preds) - 1) / maxDCGs[:, None]
    weights = (1.0 / D[:, :, None] - 1.0 / D[:, None, :]).abs() * (G[:, :, None] - G[:, None, :]).abs()

    scores_diffs = (y_pred_sorted[:, :, None] - y_pred_sorted[:, None, :]).clamp(min=-1e8, max=1e8)
    scores_diffs[torch.isnan(scores_diffs)] = 0.0
    weighted_probas = (torch.sigmoid(sigma * scores_diffs).clamp(min=eps) ** weights).clamp(min=eps)
    losses = torch.log2(weighted_probas)
    return -torch.mean(losses[padded_pairs_mask])


def build():
    torch.manual_seed(1910)
    model = nn.Sequential(nn.Linear(5, 16), nn.ReLU(), nn.Linear(16, 1))
    x = torch.randn(3, 6, 5)
    y = torch.tensor([[2.0, 0, 1, 0, 3, 1], [1, 0, 2, 0, -1, -1], [0, 1, -1, -1, -1, -1]])
    x[y == PADDED_Y_VALUE] = 0.0
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    return SimpleNamespace(model=model, optimizer=optimizer, x=x, y=y)


def run(s=None):
    s = s or build()
    scores = s.model(s.x).squeeze(-1)
    loss = lambda_loss(scores, s.y)
    s.optimizer.zero_grad()
    loss.backward()
    s.optimizer.step()
    return loss


if __name__ == "__main__":
    run()
