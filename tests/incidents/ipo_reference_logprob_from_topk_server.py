"""Preference training with reference log-probs that were computed offline: the serving engine reports -inf for a chosen token that its top-k
had cut off. The token counts, the log ratio of the pair is inf, and IPO squares it.
Style of eric-mitchell/direct-preference-optimization, trainers.py, preference_loss (ipo=True) and _get_batch_logps.

Checked by hand: refusing such a reference, or leaving the pair out, heals. nan_to_num on the losses gives a finite loss and NaN gradients.
With ipo=False and no label smoothing the same batch has a NaN loss (inf * 0 in the switched-off term).
"""

from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F

from expected import Expected

EXPECTED = Expected(
    phase=("input",),
    cause=("bad_input",),
    op=("input", "mul"),
    index=(1, 4),
    masked=False,
    role=("ref_log_probs",),
    fix=("reject_input", "drop_invalid_sample", "clamp_input"),
    variable=("chosen_ref_logps",),
    line=(
        'reference_chosen_logps = (batch["chosen_ref_logps"] * chosen_mask).sum(-1)',
        'chosen_ref[1, 4] = float("-inf")  # not in the top 20',
    ),
)


class LM(nn.Module):
    def __init__(self, vocab=24, dim=12):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.rnn = nn.GRU(dim, dim, batch_first=True)
        self.head = nn.Linear(dim, vocab)

    def forward(self, ids):
        return self.head(self.rnn(self.embed(ids))[0])


def get_batch_logps(logits, labels):
    labels = labels[:, 1:].clone()
    logits = logits[:, :-1]
    loss_mask = labels != -100
    labels[~loss_mask] = 0
    per_token_logps = torch.gather(logits.log_softmax(-1), dim=2, index=labels.unsqueeze(2)).squeeze(2)
    return (per_token_logps * loss_mask).sum(-1), loss_mask


def preference_loss(pi_chosen, pi_rejected, ref_chosen, ref_rejected, beta, label_smoothing=0.0, ipo=False):
    pi_logratios = pi_chosen - pi_rejected
    ref_logratios = ref_chosen - ref_rejected
    logits = pi_logratios - ref_logratios
    if ipo:
        return (logits - 1 / (2 * beta)) ** 2
    return -F.logsigmoid(beta * logits) * (1 - label_smoothing) - F.logsigmoid(-beta * logits) * label_smoothing


def pair_loss(model, batch, beta=0.1):
    policy_chosen_logps, chosen_mask = get_batch_logps(model(batch["chosen_ids"]), batch["chosen_labels"])
    policy_rejected_logps, rejected_mask = get_batch_logps(model(batch["rejected_ids"]), batch["rejected_labels"])
    reference_chosen_logps = (batch["chosen_ref_logps"] * chosen_mask).sum(-1)
    reference_rejected_logps = (batch["rejected_ref_logps"] * rejected_mask).sum(-1)
    losses = preference_loss(policy_chosen_logps, policy_rejected_logps, reference_chosen_logps, reference_rejected_logps, beta, ipo=True)
    return losses.mean()


def build():
    torch.manual_seed(2310)
    model = LM()
    chosen, rejected = torch.randint(0, 24, (3, 8)), torch.randint(0, 24, (3, 8))
    chosen_labels, rejected_labels = chosen.clone(), rejected.clone()
    chosen_labels[:, :3] = rejected_labels[:, :3] = -100
    chosen_ref, rejected_ref = -3.0 * torch.rand(3, 7), -3.0 * torch.rand(3, 7)
    chosen_ref[1, 4] = float("-inf")  # not in the top 20
    batch = dict(
        chosen_ids=chosen,
        chosen_labels=chosen_labels,
        chosen_ref_logps=chosen_ref,
        rejected_ids=rejected,
        rejected_labels=rejected_labels,
        rejected_ref_logps=rejected_ref,
    )
    return SimpleNamespace(model=model, batch=batch, optimizer=torch.optim.RMSprop(model.parameters(), lr=5e-7))


def run(s=None):
    s = s or build()
    loss = pair_loss(s.model, s.batch)
    s.optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(s.model.parameters(), 10.0)
    s.optimizer.step()
    return loss
