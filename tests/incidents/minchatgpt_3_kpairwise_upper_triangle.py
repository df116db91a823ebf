"""minChatGPT, KPairwiseLoss of a reward model - ranked completions whose scores have drifted far apart.

The loss takes log(sigmoid(s_i - s_j)) of all pairs and keeps the lower triangle. A well ranked pair with a margin of more than a hundred has sigmoid 0 in the mirrored pair of the upper triangle:
log makes -inf, tril drops it, the loss is finite, and backward divides 0 by 0. Source: https://github.com/ethanyanjiali/minChatGPT/pull/3 ("the loss became NaN after 3 epochs"),
src/loss.py (KPairwiseLoss). Heals: F.logsigmoid, select the lower triangle of the differences before sigmoid, clamp sigmoid from below or the difference,
sigmoid and log in double.
Does not: gradient clipping (proposed in the PR), nan_to_num on log_odds, masking the loss once more.
"""

import math
from types import SimpleNamespace

import torch
import torch.nn as nn
from expected import Expected

EXPECTED = Expected(
    phase=("backward",),
    cause=("where_grad_trap", "log_zero"),
    op=("log",),
    index=(0, 0, 3),
    masked=True,
    role=("loss", "log_probs"),
    fix=("stable_function", "mask_before_op", "clamp_input", "where_on_detached", "representable_eps", "upcast_fp32"),
    variable=(None,),
    line=("log_odds = torch.tril(torch.log(torch.sigmoid(minuend - subtrahend)), -1)",),
)


class KPairwiseLoss(nn.Module):
    def forward(self, scores):
        B, C = scores.size()
        scores = scores[:, :, None]
        subtrahend = scores.tile((1, C))
        minuend = subtrahend.transpose(2, 1)
        log_odds = torch.tril(torch.log(torch.sigmoid(minuend - subtrahend)), -1)
        total_comparision = math.comb(C, 2)
        loss = -(1 / total_comparision) * torch.mean(log_odds)
        return loss


class RewardModel(nn.Module):
    def __init__(self, vocab=30, dim=8):
        super().__init__()
        self.backbone = nn.Embedding(vocab, dim)
        self.gru = nn.GRU(dim, dim, batch_first=True)
        self.value_head = nn.Linear(dim, 1, bias=False)

    def forward(self, x):
        hidden, _ = self.gru(self.backbone(x))
        return self.value_head(hidden[:, -1])


def build():
    torch.manual_seed(2)
    model = RewardModel()
    completions = torch.randint(0, 30, (3, 4, 7))
    with torch.no_grad():
        h = torch.stack([model.gru(model.backbone(completions[:, i]))[0][:, -1] for i in range(4)], dim=1)
        direction = h[1, 0] - h[1, 3]
        model.value_head.weight.copy_(direction[None] * 140.0 / direction.pow(2).sum())
        scores = model.value_head(h).squeeze(-1)
        order = scores.argsort(dim=1, descending=True)
        for b in (0, 2):
            completions[b] = completions[b, order[b]]
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    return SimpleNamespace(model=model, optimizer=optimizer, completions=completions, criterion=KPairwiseLoss())


def run(s=None):
    s = s or build()
    scores = []
    for i in range(s.completions.size(1)):
        scores.append(s.model(s.completions[:, i]))
    scores = torch.cat(scores, dim=-1)
    loss = s.criterion(scores)
    s.optimizer.zero_grad()
    loss.backward()
    s.optimizer.step()
    return loss


if __name__ == "__main__":
    print(run())
