"""DPO on pairs whose margin is far beyond what sigmoid can represent: logsigmoid stays exact, losses of 300 and of 0 sit side by side."""

from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import nn

HEALTHY = "sigmoid(-300) is 0 in float32, the loss of that pair is 300, and logsigmoid still has the right gradient"


def sequence_logps(model, ids, labels_mask):
    logits = model(ids)[:, :-1]
    per_token = torch.gather(F.log_softmax(logits, -1), 2, ids[:, 1:].unsqueeze(2)).squeeze(2)
    return (per_token * labels_mask).sum(-1)


def build():
    torch.manual_seed(108)
    model = nn.Sequential(nn.Embedding(14, 8), nn.Linear(8, 14))
    chosen, rejected = torch.randint(0, 14, (4, 7)), torch.randint(0, 14, (4, 7))
    ref_chosen = torch.tensor([-20.0, 2980.0, -18.0, -3000.0])
    ref_rejected = torch.tensor([-19.0, -20.0, -17.5, -22.0])
    return SimpleNamespace(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=5e-4),
        chosen=chosen,
        rejected=rejected,
        refs=(ref_chosen, ref_rejected),
    )


def run(s=None, beta=0.1):
    s = s or build()
    mask = torch.ones(4, 6)
    for _ in range(4):
        both = sequence_logps(s.model, torch.cat([s.chosen, s.rejected]), torch.cat([mask, mask]))
        policy_chosen, policy_rejected = both.chunk(2)
        margin = beta * ((policy_chosen - s.refs[0]) - (policy_rejected - s.refs[1]))
        loss = -F.logsigmoid(margin).mean()
        accuracy = (margin > 0).float().mean()
        s.optimizer.zero_grad()
        loss.backward()
        s.optimizer.step()
        s.accuracy = accuracy.item()
    return loss
