"""Mallows-DPO (MallowsPO / RainbowPO trainer): the margin is scaled by the neg-log of the reference's normalised entropy, -phi * log(entropy).

One pair of the batch is boilerplate (a fixed JSON header): the reference is so sure of every next token that all other probabilities underflow,
its entropy is exactly 0 and the dispersion is -log(0) = inf. A slightly negative margin times inf makes the loss of the pair inf and its gradient
infinite or NaN; every other pair is ordinary.
Source: https://github.com/haoxian-chen/MallowsPO/blob/main/mallowsPO_trainer.py (dpo_loss, loss_type "mallows_dpo", and get_batch_logps with
calculate_entropy); a port adds 1e-8 inside the logarithm.
Heals: a floor under the entropy before the logarithm. Does not: a smaller beta, label smoothing, clamping the margin, gradient clipping.
"""

from copy import deepcopy
from math import log
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from expected import Expected
from torch import nn

EXPECTED = Expected(
    phase=("forward",),
    cause=("log_zero",),
    op=("log",),
    index=(1,),
    masked=None,
    role=("entropy", "loss", "hidden"),
    fix=("clamp_input", "stable_function", "drop_invalid_sample", "avoid_singular_op", "where_on_detached"),
    variable=(None,),
    line=("neg_log_dispersion = -dispersion_mean * torch.log(reference_entropy)",),
)

VOCAB, WIDTH, TEMPLATE = 32, 16, 24


class TinyLM(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, ids):
        return self.head(self.embed(ids))


def get_batch_logps(logits, labels, calculate_entropy=False):
    labels = labels[:, 1:].clone()
    logits = logits[:, :-1]
    loss_mask = labels != -100
    labels[labels == -100] = 0
    model_log_probs = logits.log_softmax(-1)
    entropy = None
    if calculate_entropy:
        token_entropy = -(model_log_probs.exp() * model_log_probs).sum(-1)
        entropy = (token_entropy * loss_mask).sum(-1) / (loss_mask.sum(-1) * log(logits.shape[-1]))
    per_token_logps = model_log_probs.gather(2, labels.unsqueeze(2)).squeeze(2)
    return (per_token_logps * loss_mask).sum(-1), entropy


def dpo_loss(
    policy_chosen, policy_rejected, ref_chosen, ref_rejected, reference_entropy, beta=0.1, dispersion_mean=0.29, label_smoothing=0.0
):
    logits = (policy_chosen - policy_rejected) - (ref_chosen - ref_rejected)
    neg_log_dispersion = -dispersion_mean * torch.log(reference_entropy)
    scaled = beta * logits * neg_log_dispersion
    return (
        -F.logsigmoid(scaled) * (1 - label_smoothing) - F.logsigmoid(-scaled) * label_smoothing
        if label_smoothing
        else -F.logsigmoid(scaled)
    ).mean()


def build():
    torch.manual_seed(11)
    ref = TinyLM()
    with torch.no_grad():
        ref.embed.weight[TEMPLATE:] = 0.0
        ref.embed.weight[TEMPLATE:, 0] = 40.0
        ref.head.weight[TEMPLATE + 1, 0] = 9.0  # the header always goes on with the same token
    policy = deepcopy(ref)
    with torch.no_grad():
        policy.head.weight[:, 1:] += 0.02 * torch.randn(VOCAB, WIDTH - 1)
        policy.head.weight[TEMPLATE + 1, 0] -= 0.004
        policy.head.weight[TEMPLATE + 3, 0] += 0.002
    ref.requires_grad_(False)
    chosen = torch.randint(0, TEMPLATE, (4, 7))
    rejected = torch.randint(0, TEMPLATE, (4, 7))
    chosen[1] = TEMPLATE + 1
    rejected[1] = TEMPLATE + 1
    rejected[1, -1] = TEMPLATE + 3
    labels = [ids.clone() for ids in (chosen, rejected)]
    for each in labels:
        each[:, :2] = -100
    batch = {"chosen": chosen, "rejected": rejected, "chosen_labels": labels[0], "rejected_labels": labels[1]}
    return SimpleNamespace(model=policy, ref=ref, optimizer=torch.optim.AdamW(policy.parameters(), lr=1e-3), batch=batch)


def run(s=None):
    s = s or build()
    b = s.batch
    for _ in range(2):
        with torch.no_grad():
            ref_chosen, entropy_w = get_batch_logps(s.ref(b["chosen"]), b["chosen_labels"], calculate_entropy=True)
            ref_rejected, entropy_l = get_batch_logps(s.ref(b["rejected"]), b["rejected_labels"], calculate_entropy=True)
        policy_chosen, _ = get_batch_logps(s.model(b["chosen"]), b["chosen_labels"])
        policy_rejected, _ = get_batch_logps(s.model(b["rejected"]), b["rejected_labels"])
        loss = dpo_loss(policy_chosen, policy_rejected, ref_chosen, ref_rejected, (entropy_w + entropy_l) / 2)
        s.optimizer.zero_grad()
        loss.backward()
        s.optimizer.step()
    return {"loss": loss.item(), "weights_finite": all(p.isfinite().all().item() for p in s.model.parameters())}


if __name__ == "__main__":
    print(run())
