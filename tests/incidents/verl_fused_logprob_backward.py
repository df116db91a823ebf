"""A fused log-prob floors the probability in forward but divides by the unfloored one in backward, which underflowed to 0."""

from types import SimpleNamespace

import torch
import torch.nn as nn

from expected import Expected

EXPECTED = Expected(
    phase=("backward",),
    cause=("zero_denominator", "where_grad_trap"),
    op=("div",),
    index=(7,),
    masked=False,
    role=("grad", "log_probs"),
    fix=("clamp_denominator", "stable_function"),
    variable=("grad_probs",),
    line=("grad_probs = grad_output / label_probs",),
)


class _FusedLogProb(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, labels, floor):
        probs = torch.softmax(logits, dim=-1)
        label_probs = probs.gather(-1, labels.unsqueeze(-1)).squeeze(-1)
        ctx.save_for_backward(probs, label_probs, labels)
        return label_probs.clamp_min(floor).log()

    @staticmethod
    def backward(ctx, grad_output):
        probs, label_probs, labels = ctx.saved_tensors
        grad_probs = grad_output / label_probs
        one_hot = torch.zeros_like(probs).scatter_(-1, labels.unsqueeze(-1), 1.0)
        grad_logits = (grad_probs * label_probs).unsqueeze(-1) * (one_hot - probs)
        return grad_logits, None, None


def logprobs_from_logits(logits, labels, temperature, floor=1e-10):
    flat = logits.reshape(-1, logits.shape[-1]) / temperature
    return _FusedLogProb.apply(flat, labels.reshape(-1), floor).view_as(labels)


def masked_mean(values, mask):
    return (values * mask).sum() / mask.sum()


def build():
    torch.manual_seed(104)
    actor = nn.Sequential(nn.Embedding(32, 12), nn.Tanh(), nn.Linear(12, 32))
    responses = torch.randint(0, 32, (2, 7))
    input_ids = responses.clone()
    with torch.no_grad():
        actor[2].weight.mul_(2.0)
        logits = actor(input_ids)
        responses = logits.topk(3, dim=-1).indices[..., 1]
        responses[1, 0] = logits[1, 0].argmin()
    response_mask = torch.ones(2, 7)
    response_mask[0, 5:] = 0
    batch = {
        "input_ids": input_ids,
        "responses": responses,
        "response_mask": response_mask,
        "advantages": torch.tensor([[0.9], [0.35]]).expand(2, 7),
    }
    return SimpleNamespace(model=actor, optimizer=torch.optim.AdamW(actor.parameters(), lr=1e-4), batch=batch)


def run(s=None):
    s = s or build()
    b = s.batch
    log_prob = logprobs_from_logits(s.model(b["input_ids"]), b["responses"], temperature=0.02)
    pg_loss = masked_mean(-log_prob * b["advantages"], b["response_mask"])
    s.optimizer.zero_grad()
    pg_loss.backward()
    torch.nn.utils.clip_grad_norm_(s.model.parameters(), 1.0)
    s.optimizer.step()
    return pg_loss
