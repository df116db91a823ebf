"""LSQ on the two factors of a LoRA adapter (adapter trained quantisation-aware), while a policy is fine-tuned with REINFORCE.

The step size of every quantiser is set from its weight at the first forward, 2 * mean|w| / sqrt(Qp). lora_B starts at exactly 0, so its step size is 0
and the first thing the quantiser does is 0 / 0: the whole delta is NaN in the first step, and the step size itself gets a NaN gradient.
Source: https://github.com/hustzxd/LSQuantization/blob/master/lsq.py (class FunLSQ: `q_w = (weight / alpha).round().clamp(Qn, Qp)`, initialisation at
init_state == 0); NVIDIA Model-Optimizer #1884 adds LSQ for LLMs; other ports clamp the initial step at 1e-8.
Heals: a floor under the step size. Does not: a smaller learning rate, more bits, clamping the quotient, gradient clipping.
"""

import math
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from expected import Expected
from torch import nn

EXPECTED = Expected(
    phase=("forward",),
    cause=("zero_div_zero", "zero_denominator"),
    op=("div",),
    index=(0, 0),
    masked=None,
    role=("weights", "hidden"),
    fix=("clamp_denominator", "avoid_singular_op"),
    variable=(None,),
    line=("q_w = (weight / alpha).round().clamp(Qn, Qp)",),
)


class FunLSQ(torch.autograd.Function):
    @staticmethod
    def forward(ctx, weight, alpha, g, Qn, Qp):
        ctx.save_for_backward(weight, alpha)
        ctx.other = g, Qn, Qp
        q_w = (weight / alpha).round().clamp(Qn, Qp)
        return q_w * alpha

    @staticmethod
    def backward(ctx, grad_weight):
        weight, alpha = ctx.saved_tensors
        g, Qn, Qp = ctx.other
        ratio = weight / alpha
        small = (ratio < Qn).float()
        big = (ratio > Qp).float()
        middle = 1.0 - small - big
        grad_alpha = ((small * Qn + big * Qp + middle * (ratio.round() - ratio)) * grad_weight / g).sum().unsqueeze(0)
        return grad_weight, grad_alpha, None, None, None


class WeightLSQ(nn.Module):
    def __init__(self, nbits=4):
        super().__init__()
        self.Qn, self.Qp = -(2 ** (nbits - 1)), 2 ** (nbits - 1) - 1
        self.alpha = nn.Parameter(torch.ones(1))
        self.register_buffer("init_state", torch.zeros(1))

    def forward(self, weight):
        if self.training and self.init_state == 0:
            self.alpha.data.copy_(2 * weight.detach().abs().mean() / math.sqrt(self.Qp))
            self.init_state.fill_(1)
        return FunLSQ.apply(weight, self.alpha, math.sqrt(weight.numel() * self.Qp), self.Qn, self.Qp)


class LoraLinearLSQ(nn.Module):
    def __init__(self, base, r=4, lora_alpha=8):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.lora_A = nn.Parameter(torch.empty(r, base.in_features))
        self.lora_B = nn.Parameter(torch.zeros(base.out_features, r))
        nn.init.kaiming_uniform_(self.lora_A, a=math.sqrt(5))
        self.quant_A, self.quant_B = WeightLSQ(), WeightLSQ()
        self.scaling = lora_alpha / r

    def forward(self, x):
        down = F.linear(x, self.quant_A(self.lora_A))
        return self.base(x) + self.scaling * F.linear(down, self.quant_B(self.lora_B))


class Policy(nn.Module):
    def __init__(self, vocab=40, width=24):
        super().__init__()
        self.embed = nn.Embedding(vocab, width).requires_grad_(False)
        self.proj = LoraLinearLSQ(nn.Linear(width, width))
        self.head = nn.Linear(width, vocab, bias=False).requires_grad_(False)

    def forward(self, ids):
        return self.head(torch.tanh(self.proj(self.embed(ids))))


def build():
    torch.manual_seed(3)
    model = Policy()
    batch = {
        "ids": torch.randint(0, 40, (4, 9)),
        "advantages": torch.tensor([1.2, -0.4, 0.3, -1.1]),
        "mask": (torch.arange(8) < torch.tensor([[8], [6], [7], [4]])).float(),
    }
    trainable = [p for p in model.parameters() if p.requires_grad]
    return SimpleNamespace(model=model, optimizer=torch.optim.AdamW(trainable, lr=2e-3), batch=batch)


def run(s=None):
    s = s or build()
    s.model.train()
    ids, mask = s.batch["ids"], s.batch["mask"]
    for _ in range(2):
        log_probs = s.model(ids[:, :-1]).log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)
        loss = -(log_probs * s.batch["advantages"][:, None] * mask).sum() / mask.sum()
        s.optimizer.zero_grad()
        loss.backward()
        s.optimizer.step()
    return {"loss": loss.item(), "lora_B_finite": s.model.proj.lora_B.isfinite().all().item()}


if __name__ == "__main__":
    print(run())
