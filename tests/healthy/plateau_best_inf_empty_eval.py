"""PyTorch ReduceLROnPlateau, a reward model with an evaluation slice that is empty in some rounds - best = inf, metric = NaN.

The scheduler starts with best = inf, the best checkpoint with an accuracy of -inf, and a round without pairs of the slice logs the mean of nothing (NaN). Comparisons with NaN are false, so such a round
merely counts as one without improvement; the learning rate is only ever multiplied by 0.5. Losses, gradients and weights stay finite.
Source: torch/optim/lr_scheduler.py (ReduceLROnPlateau._reset, is_better), its use in reward-model training loops with per-slice accuracies.
"""

from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F


class RewardModel(nn.Module):
    def __init__(self, vocab=25, dim=8):
        super().__init__()
        self.embed = nn.EmbeddingBag(vocab, dim)
        self.score = nn.Sequential(nn.Linear(dim, dim), nn.Tanh(), nn.Linear(dim, 1))

    def forward(self, ids):
        return self.score(self.embed(ids)).squeeze(-1)


def build():
    torch.manual_seed(0)
    model = RewardModel()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, mode="min", factor=0.5, patience=1, min_lr=1e-4)
    chosen = torch.randint(0, 25, (6, 5))
    rejected = torch.randint(0, 25, (6, 5))
    slices = [torch.tensor([1, 1, 0, 0, 0, 0]), torch.zeros(6), torch.zeros(6), torch.tensor([0, 0, 1, 0, 1, 0]), torch.zeros(6)]
    return SimpleNamespace(model=model, optimizer=optimizer, scheduler=scheduler, chosen=chosen, rejected=rejected, slices=slices)


def run(s=None):
    s = s or build()
    best_accuracy, best_state = float("-inf"), None
    log = []
    for safety in s.slices:
        margin = s.model(s.chosen) - s.model(s.rejected)
        loss = -F.logsigmoid(margin).mean()
        s.optimizer.zero_grad()
        loss.backward()
        s.optimizer.step()
        with torch.no_grad():
            margin = s.model(s.chosen) - s.model(s.rejected)
            eval_loss = -F.logsigmoid(margin)[safety.bool()].mean()
            accuracy = (margin > 0).float()[safety.bool()].mean()
        s.scheduler.step(eval_loss)
        if accuracy > best_accuracy:
            best_accuracy = accuracy
            best_state = {k: v.clone() for k, v in s.model.state_dict().items()}
        log.append({"eval_loss": eval_loss.item(), "accuracy": accuracy.item(), "lr": s.optimizer.param_groups[0]["lr"]})
    s.log = log
    s.model.load_state_dict(best_state)
    return loss


if __name__ == "__main__":
    print(run())
