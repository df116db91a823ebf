"""Nero optimizer: every neuron is kept at mean 0 and norm 1 over its inputs; the first step also projects the initial weights.

The time embedding of a small denoiser starts with Linear(1, 32): a row of one weight. Its mean is the weight itself, so that centring leaves exactly 0,
and dividing by the norm is 0 / 0. Loss and gradients of the first step are fine, the projection writes NaN into the layer.
Source: https://github.com/jxbz/nero/blob/master/optim/nero.py (`p.data -= neuron_mean(p)`, `p.data /= neuron_norm(p)`); kozistr/pytorch_optimizer adds an eps
to the norm.
Heals: a floor under the norm, or no constraints for layers with one input. Does not: gradient clipping, a smaller learning rate, the substitute of the
scale for a norm of 0, another initialisation of the layer.
"""

from types import SimpleNamespace

import torch
from expected import Expected
from torch import nn

EXPECTED = Expected(
    phase=("optimizer",),
    cause=("zero_div_zero",),
    op=("div", "div_"),
    index=(0, 0),
    masked=None,
    role=("weights", "optimizer"),
    fix=("clamp_denominator", "avoid_singular_op", "validate_config"),
    variable=("p",),
    line=("p.div_(neuron_norm(p))",),
)


def neuron_norm(x):
    if x.dim() > 1:
        view_shape = [x.shape[0]] + [1] * (x.dim() - 1)
        return x.view(x.shape[0], -1).norm(dim=1).view(*view_shape)
    return x.abs()


def neuron_mean(x):
    view_shape = [x.shape[0]] + [1] * (x.dim() - 1)
    return x.view(x.shape[0], -1).mean(dim=1).view(*view_shape)


class Nero(torch.optim.Optimizer):
    def __init__(self, params, lr=0.01, beta=0.999, constraints=True):
        super().__init__(params, {"lr": lr, "beta": beta, "constraints": constraints})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    if group["constraints"] and p.dim() > 1:
                        p.sub_(neuron_mean(p))
                        p.div_(neuron_norm(p))
                    state["step"] = 0
                    state["exp_avg_sq"] = torch.zeros_like(neuron_norm(p))
                    state["scale"] = neuron_norm(p).mean()
                    if state["scale"] == 0.0:
                        state["scale"] = torch.tensor(0.01)
                state["step"] += 1
                bias_correction = 1 - group["beta"] ** state["step"]
                state["exp_avg_sq"] = group["beta"] * state["exp_avg_sq"] + (1 - group["beta"]) * neuron_norm(p.grad) ** 2
                grad_normed = torch.nan_to_num(p.grad / (state["exp_avg_sq"] / bias_correction).sqrt(), nan=0.0)
                p.sub_(group["lr"] * state["scale"] * grad_normed)


class Denoiser(nn.Module):
    def __init__(self, dim=6, width=32):
        super().__init__()
        self.inp = nn.Linear(dim, width)
        self.time = nn.Sequential(nn.Linear(1, width), nn.SiLU(), nn.Linear(width, width))
        self.out = nn.Linear(width, dim)

    def forward(self, x, t):
        return self.out(torch.nn.functional.silu(self.inp(x) + self.time(t)))


def build():
    torch.manual_seed(1)
    model = Denoiser()
    x0, noise, t = torch.randn(16, 6), torch.randn(16, 6), torch.rand(16, 1)
    return SimpleNamespace(model=model, optimizer=Nero(model.parameters()), batch={"x0": x0, "noise": noise, "t": t})


def run(s=None):
    s = s or build()
    x0, noise, t = s.batch["x0"], s.batch["noise"], s.batch["t"]
    losses = []
    for _ in range(2):
        loss = (s.model((1 - t) * x0 + t * noise, t) - (noise - x0)).square().mean()
        s.optimizer.zero_grad()
        loss.backward()
        s.optimizer.step()
        losses.append(loss.item())
    return {"losses": losses, "time_finite": s.model.time[0].weight.isfinite().all().item()}


if __name__ == "__main__":
    print(run())
