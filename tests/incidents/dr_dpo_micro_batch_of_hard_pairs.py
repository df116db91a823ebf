"""Dr. DPO: the losses of a batch are aggregated robustly, -b * log(mean(exp(-loss / b))), and every pair of a micro-batch is far from satisfied.

The aggregation is meant to ignore mislabelled pairs: exp(-loss) of a pair with a large loss is tiny. In a micro-batch of two pairs whose DPO losses are both above 104 (long answers
with a swapped label, beta 0.5) exp(-loss) underflows to 0 for both, the mean is 0 and its log -inf: the loss is +inf and the backward of the log divides by 0.

Source: https://github.com/junkangwu/Dr_DPO/blob/main/trainers.py (mode_loss == "DrDPO")
Heals: -b * (logsumexp(-losses / b) - log n), which is the same number; a floor under the mean before the log (the batch then has no gradient).
Does not: averaging over the data-parallel ranks afterwards, clipping the gradient, a smaller learning rate, clamp of the final loss (its gradient is 0 * inf).
"""

import math
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import nn

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("log_zero",),
    op=("log",),
    index=(),
    masked=None,
    role=("loss",),
    fix=("stable_function", "clamp_input", "clamp_exponent"),
    variable=(None,),
    line=("return -mode_weight * torch.log(torch.mean(torch.exp(-losses / mode_weight)))",),
)


class TinyPolicy(nn.Module):
    def __init__(self, vocab=32, dim=24):
        super().__init__()
        self.wte = nn.Embedding(vocab, dim)
        self.gru = nn.GRU(dim, dim, batch_first=True)
        self.lm_head = nn.Linear(dim, vocab, bias=False)

    def forward(self, ids):
        h, _ = self.gru(self.wte(ids))
        return self.lm_head(h)


def batch_logps(logits, labels):
    labels = labels[:, 1:].clone()
    loss_mask = labels != -100
    labels[~loss_mask] = 0
    per_token_logps = torch.gather(logits[:, :-1].log_softmax(-1), 2, labels.unsqueeze(2)).squeeze(2)
    return (per_token_logps * loss_mask).sum(-1)


def preference_loss(policy_chosen, policy_rejected, ref_chosen, ref_rejected, beta):
    pi_logratios = policy_chosen - policy_rejected
    ref_logratios = ref_chosen - ref_rejected
    logits = pi_logratios - ref_logratios
    return -F.logsigmoid(beta * logits)


def dr_dpo(losses, mode_weight):
    return -mode_weight * torch.log(torch.mean(torch.exp(-losses / mode_weight)))


def build():
    torch.manual_seed(11)
    policy = TinyPolicy()
    batch = {}
    for name in ("chosen", "rejected"):
        ids = torch.randint(1, 32, (4, 48))
        labels = ids.clone()
        labels[:, :8] = -100
        batch[name + "_ids"], batch[name + "_labels"] = ids, labels
    with torch.no_grad():
        start_c = batch_logps(policy(batch["chosen_ids"]), batch["chosen_labels"])
        start_r = batch_logps(policy(batch["rejected_ids"]), batch["rejected_labels"])
    # the policy has drifted away from the reference: pairs 2 and 3 were annotated the wrong way round
    drift = torch.tensor([6.0, -3.0, -231.0, -264.0])
    batch["reference_chosen_logps"] = start_c - 0.5 * drift
    batch["reference_rejected_logps"] = start_r + 0.5 * drift
    optimizer = torch.optim.RMSprop(policy.parameters(), lr=5e-5)
    return SimpleNamespace(model=policy, optimizer=optimizer, batch=batch)


def run(s=None):
    s = s or build()
    out = []
    for step in range(2):
        rows = slice(2 * step, 2 * step + 2)  # micro-batches of two pairs
        chosen = batch_logps(s.model(s.batch["chosen_ids"][rows]), s.batch["chosen_labels"][rows])
        rejected = batch_logps(s.model(s.batch["rejected_ids"][rows]), s.batch["rejected_labels"][rows])
        losses = preference_loss(
            chosen, rejected, s.batch["reference_chosen_logps"][rows], s.batch["reference_rejected_logps"][rows], beta=0.5
        )
        loss = dr_dpo(losses, mode_weight=1.0)
        s.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(s.model.parameters(), 10.0)
        s.optimizer.step()
        out.append(loss.item())
    return out, math.isfinite(out[-1])


if __name__ == "__main__":
    print(run())
