"""The entropy() of transformers' run_bertology.py used as a training bonus against attention-entropy collapse. p * log(p) is NaN where the
causal mask made p = 0, the next line writes 0 over it, the loss is finite, and the backward of the product computes 0 * -inf.

https://github.com/huggingface/transformers/blob/v4.20.1/examples/research_projects/bertology/run_bertology.py (entropy), #19944
Giving log a 1 where p is 0 heals, so does the entropy from log_softmax. torch.special.entr, xlogy(p, p) and nan_to_num(plogp) do not.
"""

import math
from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F

from expected import Expected

EXPECTED = Expected(
    phase=("backward",),
    cause=("plogp_zero", "where_grad_trap", "log_zero"),
    op=("log", "mul"),
    index=(0, 0, 0, 1),
    masked=True,
    role=("entropy", "attention", "log_probs"),
    fix=("mask_before_op", "stable_function", "clamp_input", "representable_eps", "avoid_singular_op", "where_on_detached"),
    variable=(None, "plogp"),
    line=("plogp = p * torch.log(p)",),
)


def entropy(p):
    plogp = p * torch.log(p)
    plogp[p == 0] = 0
    return -plogp.sum(dim=-1)


class CausalSelfAttention(nn.Module):
    def __init__(self, n_embd=16, n_head=2, block_size=8):
        super().__init__()
        self.n_head = n_head
        self.c_attn = nn.Linear(n_embd, 3 * n_embd)
        self.c_proj = nn.Linear(n_embd, n_embd)
        self.register_buffer("bias", torch.tril(torch.ones(block_size, block_size)).view(1, 1, block_size, block_size))

    def forward(self, x):
        B, T, C = x.size()
        q, k, v = (t.view(B, T, self.n_head, C // self.n_head).transpose(1, 2) for t in self.c_attn(x).split(C, dim=2))
        scores = (q @ k.transpose(-2, -1)) / math.sqrt(k.size(-1))
        scores = scores.masked_fill(self.bias[:, :, :T, :T] == 0, float("-inf"))
        att = F.softmax(scores, dim=-1)
        y = (att @ v).transpose(1, 2).reshape(B, T, C)
        return self.c_proj(y), att


class GPT(nn.Module):
    def __init__(self, vocab=17, n_embd=16):
        super().__init__()
        self.wte = nn.Embedding(vocab, n_embd)
        self.ln = nn.LayerNorm(n_embd)
        self.attn = CausalSelfAttention(n_embd)
        self.lm_head = nn.Linear(n_embd, vocab, bias=False)

    def forward(self, idx):
        x = self.wte(idx)
        y, att = self.attn(self.ln(x))
        return self.lm_head(x + y), att


def build():
    torch.manual_seed(19944)
    model = GPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    return SimpleNamespace(model=model, optimizer=optimizer, idx=torch.randint(0, 17, (2, 7)), entropy_coef=0.01)


def run(s=None):
    s = s or build()
    logits, att = s.model(s.idx[:, :-1])
    lm_loss = F.cross_entropy(logits.flatten(0, 1), s.idx[:, 1:].flatten())
    loss = lm_loss - s.entropy_coef * entropy(att).mean()
    s.optimizer.zero_grad(set_to_none=True)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(s.model.parameters(), 1.0)
    s.optimizer.step()
    return loss


if __name__ == "__main__":
    print(run())
