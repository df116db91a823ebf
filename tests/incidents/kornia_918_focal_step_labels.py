"""Process reward model with a focal loss, gamma 0.5: where 1 - p is exactly 0 the power has an infinite slope."""

from types import SimpleNamespace

import torch
import torch.nn as nn

from expected import Expected

EXPECTED = Expected(
    phase=("backward",),
    cause=("sqrt_zero_grad",),
    op=("pow", "mul"),
    index=(2, 1),
    masked=False,
    role=("loss",),
    fix=("avoid_singular_op", "clamp_input", "representable_eps", "stable_function"),
    variable=("hardness",),
    line=("hardness = torch.pow(1.0 - prob, self.gamma)",),
)


class FocalStepLoss(nn.Module):
    def __init__(self, alpha=0.6, gamma=0.5, eps=1e-8):
        super().__init__()
        self.alpha, self.gamma, self.eps = alpha, gamma, eps

    def forward(self, scores, target, counted):
        prob = scores.sigmoid()
        hardness = torch.pow(1.0 - prob, self.gamma)
        positive = -self.alpha * hardness * target * torch.log(prob + self.eps)
        easiness = torch.pow(prob, self.gamma)
        negative = -(1.0 - self.alpha) * easiness * (1.0 - target) * torch.log(1.0 - prob + self.eps)
        return ((positive + negative) * counted).sum() / counted.sum()


class StepScorer(nn.Module):
    def __init__(self, features=10):
        super().__init__()
        self.mix = nn.Linear(features, 14)
        self.score = nn.Linear(14, 1)

    def forward(self, step_features):
        return self.score(torch.nn.functional.silu(self.mix(step_features))).squeeze(-1)


def build():
    torch.manual_seed(918)
    model = StepScorer()
    with torch.no_grad():
        model.mix.weight[4, 0], model.score.weight[0, 4] = 1.5, 1.2
    features = torch.randn(4, 5, 10)
    features[2, 1, 0] = 28.0
    counted = torch.ones(4, 5)
    counted[0, 3:] = 0.0
    labels = torch.randint(0, 2, (4, 5)).float()
    labels[2, 1] = 1.0
    batch = {"features": features, "labels": labels, "counted": counted}
    return SimpleNamespace(model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=2e-4), batch=batch, criterion=FocalStepLoss())


def run(s=None):
    s = s or build()
    loss = s.criterion(s.model(s.batch["features"]), s.batch["labels"], s.batch["counted"])
    s.optimizer.zero_grad()
    loss.backward()
    s.optimizer.step()
    return loss
