"""The sigmoid router normalises top-k scores with 1e-20; in float16 both the scores of one token and the epsilon are 0.
https://github.com/NVIDIA/Megatron-LM/issues/1545
"""

from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("eps_underflow", "zero_div_zero"),
    op=("div",),
    index=(5, 0),
    masked=False,
    role=("router",),
    fix=("upcast_fp32", "clamp_denominator", "representable_eps"),
    variable=("probs",),
    line=("probs = scores / (scores.sum(dim=-1, keepdim=True) + 1e-20)",),
)


class TopKRouter(nn.Module):
    def __init__(self, dim=6, num_experts=4, topk=2):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(num_experts, dim) * 0.3)
        self.topk = topk

    def forward(self, hidden):
        scores = torch.sigmoid(F.linear(hidden, self.weight))
        scores, top_indices = torch.topk(scores, k=self.topk, dim=1)
        probs = scores / (scores.sum(dim=-1, keepdim=True) + 1e-20)
        return probs, top_indices


class MoELayer(nn.Module):
    def __init__(self, vocab=15, dim=6, num_experts=4):
        super().__init__()
        self.embedding = nn.Embedding(vocab, dim)
        self.router = TopKRouter(dim, num_experts)
        self.experts = nn.ModuleList(nn.Linear(dim, dim, bias=False) for _ in range(num_experts))
        self.output_layer = nn.Linear(dim, vocab, bias=False)

    def forward(self, tokens):
        hidden = self.embedding(tokens)
        probs, indices = self.router(hidden)
        out = torch.zeros_like(hidden)
        for e, expert in enumerate(self.experts):
            rows, slot = torch.where(indices == e)
            out = out.index_add(0, rows, expert(hidden[rows]) * probs[rows, slot].unsqueeze(-1))
        return self.output_layer(hidden + out)


def build():
    torch.manual_seed(1545)
    model = MoELayer()
    with torch.no_grad():
        model.embedding.weight[12] = 6.0
        model.router.weight[:] = model.router.weight - model.router.weight.mean(1, keepdim=True) - 0.7
    model = model.half()
    tokens = torch.tensor([3, 1, 4, 1, 5, 12, 9, 2, 6, 5])
    return SimpleNamespace(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=1e-3), batch=tokens)


def run(s=None):
    s = s or build()
    logits = s.model(s.batch[:-1])
    loss = F.cross_entropy(logits.float(), s.batch[1:])
    s.optimizer.zero_grad()
    loss.backward()
    s.optimizer.step()
    return loss
