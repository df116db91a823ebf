"""Mixture of experts in fp16: the gate is renormalised after it was cast back to half, and its 1e-9 guard is zero there.

The softmax of the router is taken in fp32 and cast to the dtype of the stream at once. Experts are chosen by score plus a load-balancing bias, the
weights are the unbiased scores. For one token the bias selects two experts whose probabilities are below 3e-8: zero in fp16. The sum of them is
clamped to 1e-9, which is zero in fp16 as well, so the renormalisation is 0 / 0.
Source: https://github.com/kyegomez/OpenMythos/pull/41 (MoEFFN: softmax in fp32, cast, gather, clamp_min(1e-9))
Heals: keep the scores in fp32 until they are renormalised; a guard that fp16 can hold. Does not: a smaller epsilon, clipping gradients.
"""

from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import nn

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("eps_underflow", "zero_div_zero"),
    op=("div",),
    index=(4, 0),
    masked=False,
    role=("router",),
    fix=("upcast_fp32", "representable_eps", "clamp_denominator", "stable_function"),
    variable=("gate_weights",),
    line=("gate_weights = topk_scores / topk_scores.sum(dim=-1, keepdim=True).clamp_min(1e-9)",),
)


class MoEFFN(nn.Module):
    def __init__(self, dim=8, n_experts=4, topk=2):
        super().__init__()
        self.router = nn.Linear(dim, n_experts, bias=False)
        self.experts = nn.ModuleList(nn.Linear(dim, dim, bias=False) for _ in range(n_experts))
        self.register_buffer("router_bias", torch.zeros(n_experts))
        self.topk = topk

    def forward(self, flat):
        logits = self.router(flat)
        scores = F.softmax(logits, dim=-1, dtype=torch.float32).to(flat.dtype)
        topk_idx = (scores + self.router_bias).topk(self.topk, dim=-1).indices
        topk_scores = scores.gather(-1, topk_idx)
        gate_weights = topk_scores / topk_scores.sum(dim=-1, keepdim=True).clamp_min(1e-9)
        out = torch.zeros_like(flat)
        for k in range(self.topk):
            y = torch.stack([expert(flat) for expert in self.experts], dim=1)
            y = y[torch.arange(flat.shape[0]), topk_idx[:, k]]
            out = out + gate_weights[:, k : k + 1] * y
        return out


class Policy(nn.Module):
    def __init__(self, vocab=11, dim=8):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.moe = MoEFFN(dim)
        self.lm_head = nn.Linear(dim, vocab, bias=False)

    def forward(self, ids):
        h = self.embed(ids)
        h = h + self.moe(h.reshape(-1, h.shape[-1])).view_as(h)
        return self.lm_head(h)


def build():
    torch.manual_seed(6)
    model = Policy()
    with torch.no_grad():
        model.embed.weight.mul_(0.3)
        model.moe.router.weight.mul_(0.2)
        model.moe.router.weight[0, 0], model.moe.router.weight[1, 0] = 4.5, 4.4
        model.moe.router.weight[2, 0], model.moe.router.weight[3, 0] = -4.5, -4.4
        model.embed.weight[:, 0] = 0.0
        model.embed.weight[9, 0] = 2.0  # a token on which experts 0 and 1 have specialised
        model.moe.router_bias.copy_(torch.tensor([-0.6, -0.6, 0.6, 0.6]))  # after a long run of bias updates
    model.half()
    ids = torch.tensor([[1, 2, 3, 4], [9, 6, 7, 8]])
    labels = torch.tensor([[2, 3, 4, 5], [6, 7, 8, 10]])
    loss_mask = torch.tensor([[0.0, 1, 1, 1], [1, 1, 1, 0]])
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    return SimpleNamespace(model=model, optimizer=optimizer, batch={"input_ids": ids, "labels": labels, "loss_mask": loss_mask})


def run(s=None):
    s = s or build()
    out = []
    for _ in range(2):
        b = s.batch
        logits = s.model(b["input_ids"]).float()
        nll = F.cross_entropy(logits.flatten(0, 1), b["labels"].flatten(), reduction="none").view_as(b["loss_mask"])
        loss = (nll * b["loss_mask"]).sum() / b["loss_mask"].sum()
        s.optimizer.zero_grad()
        loss.backward()
        s.optimizer.step()
        out.append(loss.item())
    return out


if __name__ == "__main__":
    print(run())
