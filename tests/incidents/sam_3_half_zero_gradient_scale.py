"""SAM in half precision - the 1e-12 beside the gradient norm is no number in float16.

A margin loss is met by every sample of the batch, so all gradients are exactly 0. `rho / (grad_norm + 1e-12)` is then rho / 0: 1e-12 is
rounded to 0 in float16. The climbing step adds 0 * inf to every weight, before the second forward of the step.
Source: https://github.com/google-research/sam/issues/3 and https://github.com/davda54/sam/issues/7 (NaN with fp16), formula of davda54/sam
sam.py.
Heals: an epsilon that float16 holds and that keeps rho / eps below 65504, or the whole perturbation in float32. Does not: the norm alone in
float32 (the scale is cast back to the parameter's type and is inf again), an epsilon of 1e-7 (rho / 1e-7 is beyond 65504).
"""

from types import SimpleNamespace

import torch
import torch.nn as nn

from expected import Expected

EXPECTED = Expected(
    phase=("optimizer",),
    cause=("eps_underflow", "zero_denominator"),
    op=("reciprocal", "div"),
    index=(),
    masked=None,
    role=("optimizer", "grad"),
    fix=("representable_eps", "upcast_fp32", "clamp_denominator"),
    variable=("scale", None),
    line=('scale = group["rho"] / (grad_norm + 1e-12)',),
)


class SAM(torch.optim.Optimizer):
    """Sharpness-aware minimisation around a base optimizer: climb, second gradient, step."""

    def __init__(self, params, base_optimizer, rho=0.05, **kwargs):
        super().__init__(params, dict(rho=rho, **kwargs))
        self.base_optimizer = base_optimizer(self.param_groups, **kwargs)
        self.param_groups = self.base_optimizer.param_groups

    @torch.no_grad()
    def first_step(self, zero_grad=False):
        grad_norm = self._grad_norm()
        for group in self.param_groups:
            scale = group["rho"] / (grad_norm + 1e-12)
            for p in group["params"]:
                if p.grad is None:
                    continue
                e_w = p.grad * scale.to(p)
                p.add_(e_w)
                self.state[p]["e_w"] = e_w
        if zero_grad:
            self.zero_grad()

    @torch.no_grad()
    def second_step(self, zero_grad=False):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                p.sub_(self.state[p]["e_w"])
        self.base_optimizer.step()
        if zero_grad:
            self.zero_grad()

    def step(self, closure=None):
        raise NotImplementedError("first_step and second_step, please")

    def _grad_norm(self):
        norms = [p.grad.norm(p=2) for group in self.param_groups for p in group["params"] if p.grad is not None]
        return torch.norm(torch.stack(norms), p=2)


def build():
    torch.manual_seed(51)
    model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3)).half()
    with torch.no_grad():  # late in training: the classes are well apart
        model[0].weight.zero_()
        model[0].weight[:6] = 4 * torch.eye(6)
        model[2].weight.zero_()
        for c in range(3):
            model[2].weight[c, [c, c + 3]] = 2.0
    targets = torch.tensor([0, 1, 2, 1, 0, 2, 2, 0])
    inputs = 0.05 * torch.rand(8, 6)
    inputs[torch.arange(8), targets] += 1.0
    optimizer = SAM(model.parameters(), torch.optim.SGD, rho=0.05, lr=0.01, momentum=0.9)
    return SimpleNamespace(
        model=model, optimizer=optimizer, criterion=nn.MultiMarginLoss(margin=1.0), inputs=inputs.half(), targets=targets
    )


def run(s=None):
    s = s or build()
    s.optimizer.zero_grad()
    loss = s.criterion(s.model(s.inputs).float(), s.targets)
    loss.backward()
    s.optimizer.first_step(zero_grad=True)

    second = s.criterion(s.model(s.inputs).float(), s.targets)
    second.backward()
    s.optimizer.second_step(zero_grad=True)
    return loss


if __name__ == "__main__":
    print(run())
