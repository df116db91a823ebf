"""auto-round #207 - tuning the rounding of a mixture-of-experts layer gives a NaN loss: the quantisation scale of a group is zero in fp16.

One group of the weights holds nearly dead values (about 1e-7). Its range divided by 15 rounds to 0 in half precision, -wmin / 0 is inf, and in the
dequantisation scale * (q - zp) that is 0 * -inf = NaN: the loss is NaN, and so is the gradient of the output row with this group, whose sign is 0.
Source: https://github.com/intel/auto-round/issues/207
Heals: a floor under the scale that half precision can hold (1e-5), or computing the scale in float32. Does not: adding 1e-8 to the half scale,
which rounds away; clamping the integers to 0..15, which leaves the zero point alone.
"""

from types import SimpleNamespace

import torch
import torch.nn as nn

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("zero_denominator", "eps_underflow", "zero_div_zero", "inf_times_zero_coef"),
    op=("div", "truediv"),
    index=(5, 0),
    masked=None,
    role=("weights", "hidden"),
    fix=("clamp_denominator", "upcast_fp32", "representable_eps", "clamp_input", "avoid_singular_op", "mask_before_op"),
    variable=("zp",),
    line=("zp = -wmin / scale",),
)


class RoundSTE(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.round()

    @staticmethod
    def backward(ctx, grad):
        return grad


round_ste = RoundSTE.apply


def quant_tensor_asym(weight, v, bits=4, group_size=8):
    maxq = 2**bits - 1
    groups = weight.reshape(-1, group_size)
    wmin = groups.amin(dim=1, keepdim=True).clamp(max=0)
    wmax = groups.amax(dim=1, keepdim=True).clamp(min=0)
    scale = (wmax - wmin) / maxq
    zp = -wmin / scale
    zp = round_ste(zp)
    q = round_ste(groups / scale + v).add(zp).clamp(0, maxq)
    return (scale * (q - zp)).reshape(weight.shape)


class WrapperLinear(nn.Module):
    def __init__(self, linear, group_size=8):
        super().__init__()
        self.register_buffer("weight", linear.weight.detach())
        self.value = nn.Parameter(torch.zeros(self.weight.numel() // group_size, group_size))

    def forward(self, x):
        weight_q = quant_tensor_asym(self.weight, self.value)
        return x @ weight_q.to(x.dtype).T


class SignSGD(torch.optim.Optimizer):
    def __init__(self, params, lr):
        super().__init__(params, dict(lr=lr))

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                p.add_(p.grad.sign(), alpha=-group["lr"]).clamp_(-0.5, 0.5)


def build():
    torch.manual_seed(207)
    expert = nn.Linear(16, 6, bias=False)
    with torch.no_grad():
        expert.weight.copy_(expert.weight * 0.5)
        expert.weight[2, 8:] *= 5e-7  # the router hardly ever chose this part of the expert
    expert = expert.half()
    x = torch.randn(32, 16)
    reference = x @ expert.weight.detach().float().T
    model = WrapperLinear(expert)
    optimizer = SignSGD(model.parameters(), lr=5e-3)
    return SimpleNamespace(model=model, optimizer=optimizer, x=x, reference=reference)


def run(s=None):
    s = s or build()
    for _ in range(2):
        loss = nn.functional.mse_loss(s.model(s.x), s.reference) * 1000
        s.optimizer.zero_grad()
        loss.backward()
        s.optimizer.step()
    return loss
