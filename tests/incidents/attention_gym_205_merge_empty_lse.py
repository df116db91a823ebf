"""Prefix and suffix attention are merged by their log-sum-exp; a padded query has -inf in both and -inf - -inf is NaN."""

from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("inf_minus_inf", "nan_times_zero_mask"),
    op=("sub",),
    index=(1, 0, 4),
    masked=True,
    role=("attention",),
    fix=("finite_mask_fill", "guard_empty", "clamp_input", "mask_before_op", "safe_softmax"),
    variable=("shift_a",),
    line=("shift_a = lse_a - top",),
)


def partial_attention(q, k, v, allowed):
    scores = (q @ k.transpose(-2, -1)) * q.shape[-1] ** -0.5
    scores = scores.masked_fill(~allowed, float("-inf"))
    lse = scores.logsumexp(dim=-1)
    probs = torch.exp(scores - lse.clamp(min=-1e4).unsqueeze(-1))
    return probs @ v, lse


def merge_partials(out_a, lse_a, out_b, lse_b):
    top = torch.maximum(lse_a, lse_b)
    shift_a = lse_a - top
    shift_b = lse_b - top
    scale_a, scale_b = shift_a.exp().unsqueeze(-1), shift_b.exp().unsqueeze(-1)
    return (out_a * scale_a + out_b * scale_b) / (scale_a + scale_b)


class SplitAttention(nn.Module):
    def __init__(self, width=8, heads=2):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)

    def forward(self, x, prefix, valid):
        own = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        shared = self.qkv(prefix).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        steps = x.shape[1]
        causal = torch.ones(steps, steps, dtype=torch.bool).tril()
        suffix_mask = causal & valid[:, None, :, None] & valid[:, None, None, :]
        prefix_mask = valid[:, None, :, None].expand(-1, 1, -1, prefix.shape[1])
        q = own[0]
        a = partial_attention(q, shared[1], shared[2], prefix_mask)
        b = partial_attention(q, own[1], own[2], suffix_mask)
        return self.proj(merge_partials(*a, *b).transpose(1, 2).flatten(2))


class Policy(nn.Module):
    def __init__(self, vocab=15, width=8):
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.attn = SplitAttention(width)
        self.head = nn.Linear(width, vocab)

    def forward(self, prompt, responses, valid):
        x = self.embed(responses)
        prefix = self.embed(prompt).expand(len(x), -1, -1)
        return self.head(x + self.attn(x, prefix, valid))


def build():
    torch.manual_seed(205)
    model = Policy()
    responses = torch.randint(1, 15, (3, 7))
    valid = torch.arange(7) < torch.tensor([7, 4, 6])[:, None]
    batch = {"prompt": torch.randint(1, 15, (1, 5)), "responses": responses, "valid": valid, "adv": torch.tensor([0.5, -1.0, 0.5])}
    return SimpleNamespace(model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-4), batch=batch)


def run(s=None):
    s = s or build()
    b = s.batch
    logits = s.model(b["prompt"], b["responses"], b["valid"])
    nll = F.cross_entropy(logits[:, :-1].flatten(0, 1), b["responses"][:, 1:].flatten(), reduction="none").view(3, 6)
    weight = b["valid"][:, 1:] * b["adv"].unsqueeze(1)
    loss = (nll * weight).sum() / b["valid"][:, 1:].sum()
    loss.backward()
    s.optimizer.step()
    s.optimizer.zero_grad()
    return loss
