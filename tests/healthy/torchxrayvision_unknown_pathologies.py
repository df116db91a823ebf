"""torchxrayvision, multi-task training over merged datasets - most labels are NaN, one pathology is NaN in the whole batch.

Healthy: per task the rows with a label are selected (task_output[mask], task_target[mask]) before the criterion reads them; a task without labels is left out by len() > 0.
The NaN mean of the raw targets is a log line only. All losses, gradients and weights are finite and those of the labelled entries.
(Source: https://github.com/mlmed/torchxrayvision/issues/119, scripts/train_utils.py, train_epoch.)
"""

from types import SimpleNamespace

import torch
import torch.nn as nn


class DenseNet(nn.Module):
    def __init__(self, n_tasks=5):
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(1, 6, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten())
        self.classifier = nn.Linear(24, n_tasks)

    def forward(self, x):
        return self.classifier(self.features(x))


def build():
    torch.manual_seed(0)
    model = DenseNet()
    nan = float("nan")
    images = torch.randn(6, 1, 16, 16)
    targets = torch.tensor(
        [
            [1.0, nan, 0.0, nan, nan],
            [0.0, nan, 1.0, nan, 1.0],
            [nan, 1.0, nan, nan, 0.0],
            [nan, 0.0, nan, nan, nan],
            [1.0, nan, nan, nan, 1.0],
            [nan, nan, nan, nan, nan],
        ]
    )
    weights = torch.tensor([1.0, 0.7, 0.8, 1.0, 0.5])
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, weight_decay=1e-5, amsgrad=True)
    return SimpleNamespace(
        model=model, optimizer=optimizer, images=images, targets=targets, weights=weights, criterion=nn.BCEWithLogitsLoss(), log={}
    )


def run(s=None):
    s = s or build()
    for _ in range(3):
        s.optimizer.zero_grad()
        outputs = s.model(s.images)
        s.log["target_mean"] = s.targets.mean().item()
        loss = torch.zeros(1).float()
        for task in range(s.targets.shape[1]):
            task_output = outputs[:, task]
            task_target = s.targets[:, task]
            mask = ~torch.isnan(task_target)
            task_output = task_output[mask]
            task_target = task_target[mask]
            if len(task_target) > 0:
                task_loss = s.criterion(task_output.float(), task_target.float())
                loss += s.weights[task] * task_loss
        loss = loss.sum()
        loss.backward()
        s.optimizer.step()
    return loss


if __name__ == "__main__":
    print(run())
