"""A rejected answer lost every response token to truncation, and the averaged log-probability of that row divides zero by zero.
https://github.com/allenai/open-instruct/pull/1625
"""

from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("empty_mask_mean", "zero_div_zero"),
    op=("div",),
    index=(4,),
    masked=True,
    role=("log_probs",),
    fix=("clamp_denominator", "guard_empty", "drop_invalid_sample"),
    variable=("all_logps",),
    line=("return (per_token_logps * loss_mask).sum(-1) / loss_mask.sum(-1)",),
)


class CausalLM(nn.Module):
    def __init__(self, vocab=19, dim=6):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.proj = nn.Linear(dim, vocab)

    def forward(self, input_ids):
        return self.proj(torch.tanh(self.embed(input_ids)))


def _get_batch_logps(logits, labels, average_log_prob=False):
    labels = labels[:, 1:].clone()
    logits = logits[:, :-1, :]
    loss_mask = labels != -100
    labels[labels == -100] = 0
    per_token_logps = torch.gather(logits.log_softmax(-1), dim=2, index=labels.unsqueeze(2)).squeeze(2)
    if average_log_prob:
        return (per_token_logps * loss_mask).sum(-1) / loss_mask.sum(-1)
    return (per_token_logps * loss_mask).sum(-1)


def simpo_loss(policy_chosen_logps, policy_rejected_logps, beta=2.0, gamma_beta_ratio=0.5):
    logits = policy_chosen_logps - policy_rejected_logps - gamma_beta_ratio
    return -F.logsigmoid(beta * logits)


def build():
    torch.manual_seed(1625)
    model = CausalLM()
    input_ids = torch.randint(0, 19, (6, 8))  # three chosen rows, then three rejected rows
    labels = input_ids.clone()
    labels[:, :4] = -100
    labels[1, 6:] = -100
    labels[4] = -100
    batch = {"concatenated_input_ids": input_ids, "concatenated_labels": labels}
    return SimpleNamespace(model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=5e-5), batch=batch)


def run(s=None):
    s = s or build()
    logits = s.model(s.batch["concatenated_input_ids"])
    all_logps = _get_batch_logps(logits, s.batch["concatenated_labels"], average_log_prob=True)
    chosen_logps, rejected_logps = all_logps[:3], all_logps[3:]
    loss = simpo_loss(chosen_logps, rejected_logps).mean()
    s.optimizer.zero_grad()
    loss.backward()
    s.optimizer.step()
    return loss
