"""PhiMoE `sparsemixer`: the sparsity threshold of a padded token is 0/0, and the comparison says no.

Padding rows are zero, the router has no bias: all scores are 0, their maximum too, and (max - scores) / factor is NaN under no_grad.
NaN > threshold is False, so nothing is masked in those rows, the gates are uniform, and loss and gradients are right.

https://github.com/huggingface/transformers/blob/main/src/transformers/models/phimoe/modeling_phimoe.py
"""

from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F


def sparsemixer(scores, jitter_eps):
    multipliers, experts = [], []
    masked_scores = scores
    for _ in range(2):
        with torch.no_grad():
            mask_logits_threshold, max_ind = masked_scores.max(dim=-1, keepdim=True)
            factor = scores.abs().clamp(min=mask_logits_threshold)
            mask_logits_threshold = ((mask_logits_threshold - scores) / factor) > (2 * jitter_eps)
        masked_gates = masked_scores.masked_fill(mask_logits_threshold, float("-inf"))
        masked_gates = torch.softmax(masked_gates, dim=-1)
        multipliers.append(masked_gates.gather(dim=-1, index=max_ind))
        experts.append(max_ind)
        masked_scores = torch.scatter(scores, -1, max_ind, float("-inf"))
    return torch.cat(multipliers, -1), torch.cat(experts, -1)


class SparseMoe(nn.Module):
    def __init__(self, dim=8, num_experts=4):
        super().__init__()
        self.router = nn.Linear(dim, num_experts, bias=False)
        self.experts = nn.ModuleList(nn.Linear(dim, dim) for _ in range(num_experts))

    def forward(self, hidden):
        weights, selected = sparsemixer(self.router(hidden), jitter_eps=0.01)
        out = torch.zeros_like(hidden)
        for i, expert in enumerate(self.experts):
            gate = (weights * (selected == i)).sum(-1, keepdim=True)
            out = out + gate * torch.tanh(expert(hidden))
        return hidden + out


class Model(nn.Module):
    def __init__(self, vocab=24, dim=8):
        super().__init__()
        self.embed_tokens = nn.Embedding(vocab, dim, padding_idx=0)
        self.moe = SparseMoe(dim)
        self.lm_head = nn.Linear(dim, vocab)

    def forward(self, input_ids):
        return self.lm_head(self.moe(self.embed_tokens(input_ids)))


def build():
    torch.manual_seed(35)
    model = Model()
    input_ids = torch.randint(1, 24, (3, 8))
    input_ids[1, 5:] = 0
    input_ids[2, 6:] = 0
    labels = input_ids.masked_fill(input_ids == 0, -100)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return SimpleNamespace(model=model, optimizer=optimizer, input_ids=input_ids, labels=labels)


def run(s=None):
    s = s or build()
    logits = s.model(s.input_ids[:, :-1])
    loss = F.cross_entropy(logits.flatten(0, 1), s.labels[:, 1:].flatten(), ignore_index=-100)
    s.optimizer.zero_grad()
    loss.backward()
    s.optimizer.step()
    return loss
