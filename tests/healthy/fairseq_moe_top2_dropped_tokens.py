"""Fairseq/DeepSpeed MoE, top2gating with a small capacity - tokens dropped by both of their experts.

The best expert is filled with -inf before the second argmax, and a token that both experts drop has gates of 0 and a sum of 0. The fill only reaches argmax (no gradient), and the sum is clamped
at float32's epsilon in float32 before the division, so such a token passes through the residual alone. Everything is finite, dropped tokens have exactly zero expert output.
Source: top2gating (denom_s = gates1_s + gates2_s, torch.clamp(denom_s, min=finfo.eps)) of fairseq's and DeepSpeed's sharded MoE.
"""

from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F


def top2gating(logits, capacity):
    gates = F.softmax(logits, dim=1, dtype=torch.float)
    num_experts = gates.shape[1]
    indices1_s = torch.argmax(gates, dim=1)
    mask1 = F.one_hot(indices1_s, num_classes=num_experts)
    logits_except1 = logits.masked_fill(mask1.bool(), float("-inf"))
    indices2_s = torch.argmax(logits_except1, dim=1)
    mask2 = F.one_hot(indices2_s, num_classes=num_experts)

    locations1 = torch.cumsum(mask1, dim=0) - 1
    locations2 = torch.cumsum(mask2, dim=0) - 1
    locations2 += torch.sum(mask1, dim=0, keepdim=True)

    me = torch.mean(gates, dim=0)
    ce = torch.mean(mask1.float(), dim=0)
    l_aux = torch.mean(me * ce) * num_experts * num_experts

    mask1 = mask1 * torch.lt(locations1, capacity)
    mask2 = mask2 * torch.lt(locations2, capacity)

    gates1_s = (gates * mask1).sum(dim=1)
    gates2_s = (gates * mask2).sum(dim=1)
    denom_s = gates1_s + gates2_s
    denom_s = torch.clamp(denom_s, min=torch.finfo(denom_s.dtype).eps)
    gates1_s = gates1_s / denom_s
    gates2_s = gates2_s / denom_s
    combine = gates1_s.unsqueeze(-1) * mask1 + gates2_s.unsqueeze(-1) * mask2
    return l_aux, combine


class MoELM(nn.Module):
    def __init__(self, vocab=20, dim=8, num_experts=3):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.wg = nn.Linear(dim, num_experts, bias=False)
        self.experts = nn.ModuleList([nn.Sequential(nn.Linear(dim, 12), nn.GELU(), nn.Linear(12, dim)) for _ in range(num_experts)])
        self.lm_head = nn.Linear(dim, vocab, bias=False)

    def forward(self, input_ids, capacity):
        h = self.embed(input_ids)
        x = h.reshape(-1, h.shape[-1])
        l_aux, combine = top2gating(self.wg(x), capacity)
        out = sum(combine[:, e : e + 1] * expert(x) for e, expert in enumerate(self.experts))
        return self.lm_head(h + out.view_as(h)), l_aux


def build():
    torch.manual_seed(0)
    model = MoELM()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    input_ids = torch.randint(0, 20, (3, 9))
    advantages = torch.tensor([1.1, -0.8, -0.3])
    mask = torch.ones(3, 8)
    mask[2, 6:] = 0
    return SimpleNamespace(model=model, optimizer=optimizer, input_ids=input_ids, advantages=advantages, mask=mask, capacity=4)


def run(s=None):
    s = s or build()
    for _ in range(2):
        logits, l_aux = s.model(s.input_ids[:, :-1], s.capacity)
        logp = logits.log_softmax(-1).gather(-1, s.input_ids[:, 1:, None]).squeeze(-1)
        ratio = torch.exp(logp - logp.detach())
        pg_loss = -(s.advantages[:, None] * ratio * s.mask).sum() / s.mask.sum()
        loss = pg_loss + 0.01 * l_aux
        s.optimizer.zero_grad()
        loss.backward()
        s.optimizer.step()
    return loss


if __name__ == "__main__":
    print(run())
