"""pytorch_optimizer #480 - AdamP adds its epsilon after rsqrt(), so a second moment of zero gives an infinite inverse denominator.

Rows of the embedding whose token has not occurred have a zero gradient; rsqrt(0) = inf, inf + eps = inf, and the first moment 0 times inf is
NaN: loss and gradients are finite, the update is not. From the next step on the tied head makes every logit NaN.
Source: https://github.com/kozistr/pytorch_optimizer/issues/480 (fixed in pull request 481)
Heals: the epsilon under the root or next to it, before the inverse is taken. Does not: a larger epsilon in the same place, clipping gradients.
"""

from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F

from expected import Expected

EXPECTED = Expected(
    phase=("optimizer",),
    cause=("zero_denominator", "zero_div_zero", "inf_times_zero_coef"),
    op=("rsqrt",),
    index=(4, 0),
    masked=None,
    role=("optimizer",),
    fix=(
        "clamp_denominator",
        "clamp_input",
        "stable_function",
        "avoid_singular_op",
        "mask_before_op",
        "representable_eps",
        "where_on_detached",
    ),
    variable=("inv_de_nom",),
    line=("inv_de_nom = exp_avg_sq.rsqrt()",),
)


class AdamP(torch.optim.Optimizer):
    def __init__(self, params, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, delta=0.1, wd_ratio=0.1):
        super().__init__(params, dict(lr=lr, betas=betas, eps=eps, delta=delta, wd_ratio=wd_ratio))

    def projection(self, p, grad, perturb, delta, wd_ratio):
        if p.dim() < 2:
            return perturb, 1.0
        flat_p, flat_g = p.flatten(1), grad.flatten(1)
        cosine = F.cosine_similarity(flat_g, flat_p, dim=1, eps=1e-8).abs()
        if cosine.max() >= delta / flat_p.size(1) ** 0.5:
            return perturb, 1.0
        p_n = flat_p / flat_p.norm(dim=1, keepdim=True).clamp_min(1e-8)
        return perturb - p_n * (p_n * perturb).sum(dim=1, keepdim=True), wd_ratio

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["step"] = 0
                    state["exp_avg"] = torch.zeros_like(p)
                    state["exp_avg_sq"] = torch.zeros_like(p)
                state["step"] += 1
                exp_avg, exp_avg_sq = state["exp_avg"], state["exp_avg_sq"]
                exp_avg.mul_(beta1).add_(p.grad, alpha=1.0 - beta1)
                exp_avg_sq.mul_(beta2).addcmul_(p.grad, p.grad, value=1.0 - beta2)
                bias_correction1 = 1.0 - beta1 ** state["step"]
                bias_correction2_sq = (1.0 - beta2 ** state["step"]) ** 0.5
                inv_de_nom = exp_avg_sq.rsqrt()
                inv_de_nom = inv_de_nom.add(group["eps"]).mul(bias_correction2_sq)
                perturb = exp_avg * inv_de_nom
                perturb, wd_ratio = self.projection(p, p.grad, perturb, group["delta"], group["wd_ratio"])
                p.mul_(1.0 - group["lr"] * 1e-2 * wd_ratio)
                p.add_(perturb, alpha=-group["lr"] / bias_correction1)


class BigramModel(nn.Module):
    def __init__(self, vocab, dim):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.proj = nn.Linear(dim, dim)
        self.head = nn.Linear(dim, vocab)

    def forward(self, ids):
        return self.head(torch.tanh(self.proj(self.embed(ids))))


def build():
    torch.manual_seed(480)
    model = BigramModel(vocab=8, dim=6)
    optimizer = AdamP(model.parameters(), lr=1e-3)
    batches = [
        (torch.tensor([[0, 1, 2, 3], [5, 6, 7, 1]]), torch.tensor([[1, 2, 3, 5], [6, 7, 1, 0]])),
        (torch.tensor([[4, 1, 2, 3], [5, 6, 4, 1]]), torch.tensor([[1, 2, 3, 5], [6, 4, 1, 0]])),
    ]
    return SimpleNamespace(model=model, optimizer=optimizer, batches=batches)


def run(s=None):
    s = s or build()
    for ids, labels in s.batches:
        loss = F.cross_entropy(s.model(ids).flatten(0, 1), labels.flatten())
        s.optimizer.zero_grad()
        loss.backward()
        s.optimizer.step()
    return loss
