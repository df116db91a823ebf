"""A chunked log-prob/entropy Function guards p * logits in its forward, but its backward forms p * (log p + H) with p = 0 and log p = -inf.
https://github.com/ByteDance-Seed/VeOmni/pull/720

Two tokens sit inside a tool call whose grammar adds -inf to the forbidden logits; loss and entropy are finite, the gradient is not.
Heals: set log p to 0 where p is 0 before the product (or a finite mask fill). Does not: the identity logits - sum(p * logits) proposed in
the review, the masked logit is itself -inf.
"""

from types import SimpleNamespace

import torch
import torch.nn as nn

from expected import Expected

EXPECTED = Expected(
    phase=("backward",),
    cause=("plogp_zero",),
    op=("mul",),
    index=(1, 0),
    masked=False,
    role=("entropy", "grad"),
    fix=("stable_function", "finite_mask_fill"),
    variable=(None,),
    line=("dlogits = dlogits - probs * (log_probs + entropy.unsqueeze(-1)) * dentropy.unsqueeze(-1)",),
)


class ChunkLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, bias, labels, chunk_size):
        logps, entropies = [], []
        for h, b, y in zip(hidden.split(chunk_size), bias.split(chunk_size), labels.split(chunk_size)):
            logits = h @ weight.t() + b
            probs = logits.softmax(-1)
            lse = logits.logsumexp(-1)
            logps.append(logits.gather(-1, y[:, None]).squeeze(-1) - lse)
            entropies.append(lse - (probs * logits.masked_fill(probs == 0, 0.0)).sum(-1))
        ctx.save_for_backward(hidden, weight, bias, labels)
        ctx.chunk_size = chunk_size
        return torch.cat(logps), torch.cat(entropies)

    @staticmethod
    def backward(ctx, dlogp, dent):
        hidden, weight, bias, labels = ctx.saved_tensors
        dhidden, dweight = torch.zeros_like(hidden), torch.zeros_like(weight)
        for start in range(0, len(hidden), ctx.chunk_size):
            rows = slice(start, start + ctx.chunk_size)
            dlogprob, dentropy = dlogp[rows], dent[rows]
            logits = hidden[rows] @ weight.t() + bias[rows]
            log_probs = logits.log_softmax(-1)
            probs = log_probs.exp()
            entropy = logits.logsumexp(-1) - (probs * logits.masked_fill(probs == 0, 0.0)).sum(-1)
            one_hot = torch.zeros_like(probs).scatter_(-1, labels[rows, None], 1.0)
            dlogits = (one_hot - probs) * dlogprob.unsqueeze(-1)
            dlogits = dlogits - probs * (log_probs + entropy.unsqueeze(-1)) * dentropy.unsqueeze(-1)
            dhidden[rows] = dlogits @ weight
            dweight += dlogits.t() @ hidden[rows]
        return dhidden, dweight, None, None, None


class Policy(nn.Module):
    def __init__(self, vocab=12, width=8):
        super().__init__()
        self.emb = nn.Embedding(vocab, width)
        self.block = nn.Sequential(nn.Linear(width, width), nn.GELU())
        self.lm_head = nn.Linear(width, vocab, bias=False)

    def forward(self, ids, labels, logit_bias):
        hidden = self.block(self.emb(ids))
        flat = hidden.flatten(0, 1), self.lm_head.weight, logit_bias.flatten(0, 1), labels.flatten()
        logp, entropy = ChunkLogProbs.apply(*flat, 4)
        return logp.view_as(labels), entropy.view_as(labels)


def build():
    torch.manual_seed(720)
    policy = Policy()
    ids = torch.randint(0, 12, (2, 7))
    input_ids, labels = ids[:, :-1], ids[:, 1:].clone()
    logit_bias = torch.zeros(2, 6, 12)
    logit_bias[0, 5, :4] = float("-inf")  # grammar: only ids 4.. are legal here
    logit_bias[1, 0, 6:] = float("-inf")
    labels[0, 5], labels[1, 0] = 7, 2
    mask = torch.ones(2, 6)
    mask[0, :2] = 0
    mask[1, 5] = 0
    with torch.no_grad():
        old_logp, _ = policy(input_ids, labels, logit_bias)
    batch = dict(ids=input_ids, labels=labels, bias=logit_bias, mask=mask, old=old_logp, adv=torch.tensor([[0.8], [-0.6]]))
    return SimpleNamespace(model=policy, optimizer=torch.optim.AdamW(policy.parameters(), lr=1e-4), batch=batch, ent_coef=0.01)


def run(s=None):
    s = s or build()
    b = s.batch
    logp, entropy = s.model(b["ids"], b["labels"], b["bias"])
    ratio = torch.exp(logp - b["old"])
    pg = -torch.min(ratio * b["adv"], ratio.clamp(0.8, 1.28) * b["adv"])
    loss = ((pg - s.ent_coef * entropy) * b["mask"]).sum() / b["mask"].sum()
    s.optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(s.model.parameters(), 1.0)
    s.optimizer.step()
    return loss
