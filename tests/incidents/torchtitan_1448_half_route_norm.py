"""Fine-tuning a sigmoid-routed MoE (DeepSeek-V3 form, torchtitan's TokenChoiceTopKRouter with route_norm) with half weights.

The scores are normalised by their sum + 1e-20. In half 1e-20 is 0, and the sigmoid of a logit under -17 is 0 too: the sink token, for which the gate has closed
all experts, gets 0/0. In fp32 the same token has scores of 1e-9 that normalise well.
Source: https://github.com/pytorch/torchtitan/issues/1448
Heals: scores in fp32, an epsilon that half can hold.  Does not: more experts per token, clipping.
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
    index=(0, 0),
    masked=False,
    role=("router",),
    fix=("upcast_fp32", "representable_eps", "clamp_denominator", "stable_function", "clamp_input"),
    variable=("top_scores",),
    line=("top_scores = top_scores / denominator",),
)


class TokenChoiceTopKRouter(nn.Module):
    def __init__(self, dim, num_experts, top_k, route_scale=1.0):
        super().__init__()
        self.gate = nn.Linear(dim, num_experts, bias=False)
        self.top_k, self.route_scale = top_k, route_scale

    def forward(self, x):
        scores = torch.sigmoid(self.gate(x))
        top_scores, selected = torch.topk(scores, k=self.top_k, dim=1)
        denominator = top_scores.sum(dim=-1, keepdim=True) + 1e-20
        top_scores = top_scores / denominator
        return top_scores * self.route_scale, selected


class MoE(nn.Module):
    def __init__(self, dim, num_experts=4, top_k=2):
        super().__init__()
        self.router = TokenChoiceTopKRouter(dim, num_experts, top_k)
        self.experts = nn.ModuleList(nn.Linear(dim, dim, bias=False) for _ in range(num_experts))
        self.shared = nn.Linear(dim, dim, bias=False)

    def forward(self, x):
        flat = x.flatten(0, 1)
        weight, selected = self.router(flat)
        outs = torch.stack([F.silu(e(flat)) for e in self.experts], dim=1)
        picked = outs.gather(1, selected[..., None].expand(-1, -1, flat.shape[-1]))
        return self.shared(x) + (picked * weight[..., None]).sum(1).view_as(x)


class Model(nn.Module):
    def __init__(self, vocab=32, dim=16):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.norm = nn.RMSNorm(dim)
        self.moe = MoE(dim)
        self.head = nn.Linear(dim, vocab, bias=False)

    def forward(self, ids):
        h = self.embed(ids)
        return self.head(h + self.moe(self.norm(h)))


def build():
    torch.manual_seed(6)
    model = Model()
    with torch.no_grad():  # the gate of the checkpoint closes all experts for <bos>
        bos = F.normalize(model.norm(model.embed.weight[1]), dim=0)
        w = model.moe.router.gate.weight
        w -= (w @ bos)[:, None] * bos
        w -= torch.tensor([5.2, 5.6, 5.3, 5.9])[:, None] * bos
        rest = F.normalize(model.norm(model.embed.weight[2:]), dim=1)
        rest = rest - (rest @ bos).clamp(min=0)[:, None] * bos
        model.embed.weight[2:] = rest * 4
    model = model.half()
    ids = torch.randint(2, 32, (2, 8))
    ids[:, 0] = 1
    loss_mask = torch.ones(2, 7)
    loss_mask[1, 4:] = 0
    return SimpleNamespace(
        model=model, optimizer=torch.optim.SGD(model.parameters(), lr=1e-2), batch={"input_ids": ids, "loss_mask": loss_mask}
    )


def run(s=None):
    s = s or build()
    ids, loss_mask = s.batch["input_ids"], s.batch["loss_mask"]
    for _ in range(2):
        logits = s.model(ids[:, :-1]).float()
        nll = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none").view(2, 7)
        loss = (nll * loss_mask).sum() / loss_mask.sum()
        s.optimizer.zero_grad()
        loss.backward()
        s.optimizer.step()
    return loss.item()


if __name__ == "__main__":
    print(run())
