"""uclaml/MoE, gumbel_noise - the uniform draw is rounded to bfloat16, 0.999 becomes 1, and log(-log(1)) is infinite.

The router of a mixture of experts adds Gumbel noise to its logits, -log(-log(u)). The network runs in bfloat16, so u is drawn and converted; every
draw above 1 - 2^-9 rounds up to exactly 1. Then -log(u) is 0, its logarithm -inf, the noise +inf, and the softmax over the experts of that token is
inf - inf = NaN. One token in a few hundred is enough: loss and all gradients are NaN.

Source: https://github.com/uclaml/MoE/blob/main/MoE_Visualization.ipynb (`gumbel_noise`); the half-precision failure of the same formula:
https://github.com/pytorch/pytorch/issues/34372, https://github.com/pytorch/pytorch/issues/41663

Heals: make the noise in float32 and convert the result, or floor -log(u) before its logarithm. Does not heal: `u.clamp(max=1 - 1e-6)` and
`u + 1e-10` (both are 1 again in bfloat16).
"""

from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("log_zero",),
    op=("log",),
    index=(18, 3),
    masked=False,
    role=("router", "logits"),
    fix=("upcast_fp32", "clamp_input", "representable_eps"),
    variable=(None,),
    line=("return -torch.log(exponential)",),
)


def gumbel_noise(shape, dtype, generator):
    uniform = torch.rand(shape, generator=generator).to(dtype)
    exponential = -torch.log(uniform)
    return -torch.log(exponential)


class Expert(nn.Module):
    def __init__(self, dim, hidden=12):
        super().__init__()
        self.fc1 = nn.Linear(dim, hidden)
        self.fc2 = nn.Linear(hidden, dim)

    def forward(self, x):
        return self.fc2(F.gelu(self.fc1(x)))


class MoE(nn.Module):
    def __init__(self, dim=8, num_experts=8, temperature=1.0):
        super().__init__()
        self.router = nn.Linear(dim, num_experts, bias=False)
        self.experts = nn.ModuleList(Expert(dim) for _ in range(num_experts))
        self.temperature = temperature

    def forward(self, x, generator):
        logits = self.router(x)
        noisy = logits + gumbel_noise(logits.shape, logits.dtype, generator)
        soft = torch.softmax(noisy / self.temperature, dim=-1)
        hard = torch.zeros_like(soft).scatter(-1, noisy.argmax(-1, keepdim=True), 1.0)
        gates = hard + soft - soft.detach()  # straight through
        outputs = torch.stack([expert(x) for expert in self.experts], dim=1)
        return (gates[:, :, None] * outputs).sum(dim=1)


class Classifier(nn.Module):
    def __init__(self, dim=8, classes=5):
        super().__init__()
        self.moe = MoE(dim)
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, classes)

    def forward(self, x, generator):
        return self.head(self.norm(x + self.moe(x, generator)))


def build():
    torch.manual_seed(2109)
    model = Classifier().to(torch.bfloat16)
    x = torch.randn(32, 8).to(torch.bfloat16)
    return SimpleNamespace(
        model=model,
        x=x,
        labels=torch.randint(0, 5, (32,)),
        generator=torch.Generator().manual_seed(6),
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3),
    )


def run(s=None):
    s = s or build()
    s.optimizer.zero_grad(set_to_none=True)
    logits = s.model(s.x, s.generator)
    loss = F.cross_entropy(logits.float(), s.labels)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(s.model.parameters(), 1.0)
    s.optimizer.step()
    return loss


if __name__ == "__main__":
    print(run())
