"""KTO micro-batch without a single undesirable answer: its metrics are means over nothing (NaN), the loss uses cat and is fine."""

from types import SimpleNamespace

import torch
from torch import nn

HEALTHY = "the mean reward of the undesirable answers is NaN because there are none; it is only logged"


def build():
    torch.manual_seed(109)
    model = nn.Sequential(nn.Embedding(16, 8), nn.Linear(8, 16))
    ids = torch.randint(0, 16, (4, 6))
    desirable = torch.tensor([[True, True, True, True], [True, False, True, False]])
    return SimpleNamespace(model=model, ids=ids, desirable=desirable, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3), logs=[])


def kto_loss(policy_logps, ref_logps, desirable, kl, beta=0.1):
    log_ratio = policy_logps - ref_logps
    chosen, rejected = log_ratio[desirable], log_ratio[~desirable]
    chosen_losses = 1 - torch.sigmoid(beta * (chosen - kl))
    rejected_losses = 1 - torch.sigmoid(beta * (kl - rejected))
    losses = torch.cat((chosen_losses, 1.3 * rejected_losses), 0)
    return losses, beta * chosen.detach(), beta * rejected.detach()


def run(s=None):
    s = s or build()
    for step in range(4):
        logp = s.model(s.ids[:, :-1]).log_softmax(-1).gather(-1, s.ids[:, 1:, None]).squeeze(-1).sum(-1)
        ref = logp.detach() - torch.tensor([0.4, -0.3, 0.1, 0.0])
        kl = (logp.detach().roll(1) - ref.roll(1)).mean().clamp(min=0)
        losses, good, bad = kto_loss(logp, ref, s.desirable[step % 2], kl)
        s.logs.append({"rewards/chosen": good.mean().item(), "rewards/rejected": bad.mean().item()})
        loss = losses.mean()
        s.optimizer.zero_grad()
        loss.backward()
        s.optimizer.step()
    return loss
