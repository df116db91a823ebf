"""megablocks #133 - the router z-loss is written log(exp(logits).sum()) ** 2 instead of torch.logsumexp.

After some thousand steps the router has grown: one token's expert logit passes 88.7, exp overflows in fp32, the z-loss is inf and every
gradient of the router and below is NaN. The softmax over the same logits is fine, so the language loss looks healthy on its own.
Source: https://github.com/databricks/megablocks/pull/133 (review: "numerically unstable, this should use torch.logsumexp instead").
Heals: torch.logsumexp; also a clamp of the logits before exp. Does not: nan_to_num or a clamp of the finished z-loss (the gradient stays NaN),
nor a smaller z-loss coefficient.
"""

from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("exp_overflow",),
    op=("exp",),
    index=(9, 2),
    masked=None,
    role=("router", "logits"),
    fix=("stable_function", "clamp_exponent", "clamp_input"),
    variable=("exp_logits",),
    line=("exp_logits = torch.exp(expert_logits)",),
)


def batched_load_balancing_loss(tokens_per_expert, expert_scores, expert_logits, args):
    tokens, num_experts = expert_scores.shape
    scale = args.moe_loss_weight * num_experts / (tokens * args.moe_top_k)
    lbl = scale * torch.dot(tokens_per_expert, expert_scores.mean(dim=0))
    exp_logits = torch.exp(expert_logits)
    zloss = (torch.log(exp_logits.sum(dim=-1)) ** 2).sum() / tokens
    return lbl + args.moe_zloss_weight * zloss


class MoE(nn.Module):
    def __init__(self, args):
        super().__init__()
        self.args = args
        self.router = nn.Linear(args.hidden, args.num_experts, bias=False)
        self.experts = nn.ModuleList(nn.Linear(args.hidden, args.hidden) for _ in range(args.num_experts))

    def forward(self, x):
        expert_logits = self.router(x)
        scores = expert_logits.softmax(dim=-1)
        expert_weights, expert_indices = scores.topk(self.args.moe_top_k, dim=-1)
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            gate = (expert_weights * (expert_indices == e)).sum(-1, keepdim=True)
            out = out + gate * F.gelu(expert(x))
        tokens_per_expert = torch.bincount(expert_indices.flatten(), minlength=self.args.num_experts).float()
        aux = batched_load_balancing_loss(tokens_per_expert, scores, expert_logits, self.args)
        return x + out, aux


class Model(nn.Module):
    def __init__(self, args):
        super().__init__()
        self.embed = nn.Embedding(args.vocab, args.hidden)
        self.moe = MoE(args)
        self.head = nn.Linear(args.hidden, args.vocab)

    def forward(self, ids):
        h, aux = self.moe(self.embed(ids).flatten(0, 1))
        return self.head(h), aux


def build():
    torch.manual_seed(133)
    args = SimpleNamespace(vocab=24, hidden=16, num_experts=4, moe_top_k=2, moe_loss_weight=0.01, moe_zloss_weight=1e-3)
    model = Model(args)
    ids = torch.randint(1, 24, (2, 8))
    ids[1, 1] = 0  # the newline token, whose row has grown
    with torch.no_grad():
        direction = model.moe.router.weight[2] / model.moe.router.weight[2].norm()
        model.moe.router.weight[2] = direction * 6.0
        model.embed.weight[0] = direction * 17.0
    labels = torch.randint(1, 24, (16,))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    return SimpleNamespace(model=model, optimizer=optimizer, ids=ids, labels=labels, args=args)


def run(s=None):
    s = s or build()
    logits, aux_loss = s.model(s.ids)
    loss = F.cross_entropy(logits, s.labels) + aux_loss
    s.optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(s.model.parameters(), 1.0)
    s.optimizer.step()
    return loss
