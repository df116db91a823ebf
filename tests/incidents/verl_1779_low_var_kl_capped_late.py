"""Low-variance KL is capped after the exponential, so padding gives a finite loss and a NaN gradient (0 * inf)."""

from types import SimpleNamespace

import torch
import torch.nn as nn

from expected import Expected

EXPECTED = Expected(
    phase=("backward",),
    cause=("where_grad_trap", "inf_times_zero_mask", "exp_overflow"),
    op=("exp",),
    index=(0, 6),
    masked=True,
    role=("kl", "ratio"),
    fix=("mask_before_op", "clamp_exponent"),
    variable=("odds",),
    line=("odds = delta.exp()",),
)

PAD = 0


class Actor(nn.Module):
    def __init__(self, vocab=17, width=8):
        super().__init__()
        self.wte = nn.Embedding(vocab, width)
        self.rnn = nn.GRU(width, width, batch_first=True)
        self.unembed = nn.Linear(width, vocab)

    def forward(self, ids):
        hidden, _ = self.rnn(self.wte(ids))
        return self.unembed(hidden)


def response_log_prob(actor, prompts, responses):
    ids = torch.cat((prompts, responses), dim=1)
    logits = actor(ids)[:, prompts.shape[1] - 1 : -1]
    return -nn.functional.cross_entropy(logits.transpose(1, 2), responses, reduction="none")


def low_var_kl(log_prob, ref_log_prob, bound=10.0):
    delta = ref_log_prob - log_prob
    odds = delta.exp()
    return (odds - delta - 1).clamp(-bound, bound)


def masked_mean(values, mask):
    return (values * mask).sum() / (mask.sum() + 1e-8)


def build():
    torch.manual_seed(1779)
    actor = Actor()
    with torch.no_grad():
        actor.unembed.bias[PAD] = -115.0  # padding is never a target of the language model
    prompts = torch.randint(1, 17, (3, 4))
    responses = torch.randint(1, 17, (3, 9))
    response_mask = (torch.arange(9) < torch.tensor([[6], [9], [8]])).float()
    responses = torch.where(response_mask.bool(), responses, PAD)
    with torch.no_grad():
        old_log_prob = response_log_prob(actor, prompts, responses)
        ref_log_prob = (old_log_prob + 0.05 * torch.randn(3, 9)) * response_mask
    advantages = torch.tensor([[0.7], [-0.9], [0.2]])
    batch = dict(prompts=prompts, responses=responses, mask=response_mask, old=old_log_prob, ref=ref_log_prob, adv=advantages)
    return SimpleNamespace(model=actor, optimizer=torch.optim.AdamW(actor.parameters(), lr=1e-6), batch=batch)


def run(s=None):
    s = s or build()
    b = s.batch
    log_prob = response_log_prob(s.model, b["prompts"], b["responses"])
    surrogate = -b["adv"] * torch.exp((log_prob - b["old"]).clamp(-20.0, 20.0))
    loss = masked_mean(surrogate, b["mask"]) + 0.001 * masked_mean(low_var_kl(log_prob, b["ref"]), b["mask"])
    s.optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(s.model.parameters(), max_norm=1.0)
    s.optimizer.step()
    return loss
