"""KTO takes its KL reference point from mismatched pairs; all were truncated in this micro-batch and the mean of nothing is NaN."""

from types import SimpleNamespace

import torch
import torch.nn as nn

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("empty_mask_mean", "zero_div_zero"),
    op=("mean",),
    index=(),
    masked=None,
    role=("kl", "log_ratio"),
    fix=("guard_empty",),
    variable=("KL",),
    line=("KL = (policy_KL_logps - reference_KL_logps).mean()",),
)


class KTOLoss(nn.Module):
    def __init__(self, beta, desirable_weight, undesirable_weight):
        super().__init__()
        self.beta = beta
        self.desirable_weight = desirable_weight
        self.undesirable_weight = undesirable_weight

    def forward(self, policy_logps, reference_logps, desirable, policy_KL_logps, reference_KL_logps):
        KL = (policy_KL_logps - reference_KL_logps).mean()
        KL = KL.detach().clamp(min=0)
        logratios = policy_logps - reference_logps
        chosen_losses = 1 - torch.sigmoid(self.beta * (logratios[desirable] - KL))
        rejected_losses = 1 - torch.sigmoid(self.beta * (KL - logratios[~desirable]))
        return torch.cat((self.desirable_weight * chosen_losses, self.undesirable_weight * rejected_losses), 0).mean()


def sequence_logps(model, input_ids, loss_mask):
    logps = model(input_ids[:, :-1]).log_softmax(-1)
    return (logps.gather(-1, input_ids[:, 1:, None]).squeeze(-1) * loss_mask[:, 1:]).sum(-1)


def build():
    torch.manual_seed(111)
    policy = nn.Sequential(nn.Embedding(17, 8), nn.Linear(8, 17))
    micro_batches = []
    for kept in ([True, True, False, True], [False, False, False, False]):
        input_ids = torch.randint(0, 17, (4, 9))
        kl_ids = torch.randint(0, 17, (4, 9))
        loss_mask = torch.ones(4, 9)
        loss_mask[:, :3] = 0
        with torch.no_grad():
            reference_logps = sequence_logps(policy, input_ids, loss_mask) + 0.2 * torch.randn(4)
            reference_KL_logps = sequence_logps(policy, kl_ids, loss_mask) - 0.1
        micro_batches.append(
            {
                "input_ids": input_ids,
                "kl_ids": kl_ids,
                "loss_mask": loss_mask,
                "kl_keep": torch.tensor(kept),
                "desirable": torch.tensor([True, False, True, False]),
                "reference_logps": reference_logps,
                "reference_KL_logps": reference_KL_logps,
            }
        )
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-4)
    return SimpleNamespace(model=policy, optimizer=optimizer, batch=micro_batches, loss_fn=KTOLoss(0.1, 1.0, 1.33))


def run(s=None):
    s = s or build()
    s.optimizer.zero_grad()
    total = 0.0
    for mb in s.batch:
        policy_logps = sequence_logps(s.model, mb["input_ids"], mb["loss_mask"])
        with torch.no_grad():
            policy_KL_logps = sequence_logps(s.model, mb["kl_ids"], mb["loss_mask"])
        keep = mb["kl_keep"]
        loss = s.loss_fn(policy_logps, mb["reference_logps"], mb["desirable"], policy_KL_logps[keep], mb["reference_KL_logps"][keep])
        loss = loss / len(s.batch)
        loss.backward()
        total = total + loss.detach()
    s.optimizer.step()
    return total
