"""SkyRL-tx #498: the per-sequence loss is divided by loss_mask.sum(-1); the review's answer to a padding-only row was nan_to_num.

Source: https://github.com/NovaSky-AI/SkyRL/pull/498 (engine.py, loss_fns.py; here in torch). The suggested nan_to_num around the quotient turns
the 0/0 of the padding-only sequence into 0, so the loss looks right, but the backward of the division still computes 0/0 and every weight
that the row touches gets NaN.
Heals: a clamped denominator, treating or dropping the empty row before the division. Tempting and useless: the nan_to_num that is there,
or torch.where(count > 0, quotient, 0).
"""

from types import SimpleNamespace

import torch
import torch.nn as nn

from expected import Expected

EXPECTED = Expected(
    phase=("backward",),
    cause=("where_grad_trap", "zero_div_zero", "empty_mask_mean"),
    op=("div",),
    index=(2,),
    masked=True,
    role=("loss",),
    fix=(
        "clamp_denominator",
        "guard_empty",
        "drop_invalid_sample",
        "mask_before_op",
        "representable_eps",
        "clamp_input",
        "fix_upstream",
        "reject_input",
    ),
    variable=(None,),
    line=("per_seq_loss = torch.nan_to_num((per_token_losses * loss_mask).sum(dim=-1) / loss_mask.sum(dim=-1))",),
)


class LoraModel(nn.Module):
    def __init__(self, vocab=20, dim=16, rank=4):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.base = nn.Linear(dim, dim)
        self.lora_a = nn.Parameter(torch.randn(dim, rank) * 0.1)
        self.lora_b = nn.Parameter(torch.randn(rank, dim) * 0.02)
        self.lm_head = nn.Linear(dim, vocab, bias=False)
        for name, p in self.named_parameters():
            p.requires_grad_("lora" in name)

    def forward(self, input_ids):
        x = self.embed(input_ids)
        h = torch.tanh(self.base(x) + x @ self.lora_a @ self.lora_b)
        return self.lm_head(h)


def importance_sampling_loss(target_logprobs, sampling_logprobs, advantages):
    prob_ratio = torch.exp(target_logprobs - sampling_logprobs)
    return -prob_ratio * advantages


def ppo_loss(target_logprobs, sampling_logprobs, advantages):
    prob_ratio = torch.exp(target_logprobs - sampling_logprobs)
    clipped = prob_ratio.clamp(0.8, 1.2)
    return -torch.minimum(prob_ratio * advantages, clipped * advantages)


LOSS_FNS = {"importance_sampling": importance_sampling_loss, "ppo": ppo_loss}


def forward_backward(model, batch, loss_fn="importance_sampling"):
    logits = model(batch["input_ids"])
    target_logprobs = logits.log_softmax(-1).gather(-1, batch["target_ids"].unsqueeze(-1)).squeeze(-1)
    per_token_losses = LOSS_FNS[loss_fn](target_logprobs, batch["sampling_logprobs"], batch["advantages"])
    loss_mask = batch["loss_mask"]
    per_seq_loss = torch.nan_to_num((per_token_losses * loss_mask).sum(dim=-1) / loss_mask.sum(dim=-1))
    loss = per_seq_loss.sum()
    loss.backward()
    return loss.detach(), target_logprobs.detach()


def build():
    torch.manual_seed(498)
    model = LoraModel()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=4e-5)
    ids = torch.randint(1, 20, (4, 9))
    loss_mask = torch.zeros(4, 8)
    loss_mask[0, 3:8] = 1
    loss_mask[1, 2:6] = 1
    loss_mask[3, 4:8] = 1  # request 2 only pads the micro-batch to its size
    batch = dict(
        input_ids=ids[:, :-1],
        target_ids=ids[:, 1:],
        loss_mask=loss_mask,
        advantages=torch.tensor([0.5, -0.5, 0.0, 1.0]).unsqueeze(-1).expand(4, 8),
    )
    with torch.no_grad():
        logprobs = model(batch["input_ids"]).log_softmax(-1).gather(-1, batch["target_ids"].unsqueeze(-1)).squeeze(-1)
    batch["sampling_logprobs"] = logprobs + 0.01
    return SimpleNamespace(model=model, optimizer=optimizer, batch=batch)


def run(s=None):
    s = s or build()
    s.optimizer.zero_grad()
    loss, s.logprobs = forward_backward(s.model, s.batch)
    s.optimizer.step()
    return loss
