"""AdaNorm #1 / pytorch_optimizer #431 - the gradient norm correction of AdaNorm divides a zero gradient by its own norm.

AdamNorm rescales a gradient whose norm fell below its running mean: grad * exp_grad_norm / grad_norm. In the second batch of a multi-task cloning run
no transition closes the gripper: its masked loss is 0, and the gradient of the gripper head is exactly 0 (zero_grad keeps tensors). The running norm of
the first step is above 0, so the branch is taken and computes 0 / 0. Loss and gradients are finite; the head's weights become NaN in the step.
The author's answer was that "the network will always generate some gradient".

Source: https://github.com/shivram1987/AdaNorm/issues/1 ; https://github.com/kozistr/pytorch_optimizer/pull/431 (get_adanorm_gradient)
Heals: an epsilon in the denominator, the branch only for grad_norm > 0 (skip the rescale of a zero gradient). Does not: clipping gradients, the eps of
the Adam denominator, a smaller learning rate, checking the loss.
"""

from types import SimpleNamespace

import torch
from torch import nn
from torch.nn import functional as F

from expected import Expected

EXPECTED = Expected(
    phase=("optimizer",),
    cause=("zero_div_zero",),
    op=("div", "truediv", "__truediv__"),
    index=(0, 0),
    masked=None,
    role=("optimizer", "grad"),
    fix=("clamp_denominator", "avoid_singular_op", "skip_disabled_term"),
    variable=("s_grad",),
    line=("s_grad = grad * exp_grad_norm / grad_norm if exp_grad_norm > grad_norm else grad",),
)


class AdamNorm(torch.optim.Optimizer):
    def __init__(self, params, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, r=0.95):
        super().__init__(params, dict(lr=lr, betas=betas, eps=eps, r=r))

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                grad, state = p.grad, self.state[p]
                if not state:
                    state["step"] = 0
                    state["exp_avg"] = torch.zeros_like(p)
                    state["exp_avg_sq"] = torch.zeros_like(p)
                    state["exp_grad_norm"] = torch.zeros((1,), dtype=grad.dtype)
                state["step"] += 1
                exp_avg, exp_avg_sq, exp_grad_norm = state["exp_avg"], state["exp_avg_sq"], state["exp_grad_norm"]
                grad_norm = torch.linalg.norm(grad)
                exp_grad_norm.mul_(group["r"]).add_(grad_norm, alpha=1.0 - group["r"])
                s_grad = grad * exp_grad_norm / grad_norm if exp_grad_norm > grad_norm else grad
                exp_avg.mul_(beta1).add_(s_grad, alpha=1.0 - beta1)
                exp_avg_sq.mul_(beta2).addcmul_(grad, grad, value=1.0 - beta2)
                de_nom = exp_avg_sq.sqrt().add_(group["eps"])
                step_size = group["lr"] * (1.0 - beta2 ** state["step"]) ** 0.5 / (1.0 - beta1 ** state["step"])
                p.addcdiv_(exp_avg, de_nom, value=-step_size)


class MultiTaskPolicy(nn.Module):
    def __init__(self, obs_dim=12, hidden=32, act_dim=6):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(obs_dim, hidden), nn.LayerNorm(hidden), nn.GELU())
        self.arm = nn.Linear(hidden, act_dim)
        self.gripper = nn.Linear(hidden, 2)

    def forward(self, obs):
        h = self.trunk(obs)
        return self.arm(h), self.gripper(h)


def build():
    torch.manual_seed(1)
    model = MultiTaskPolicy()
    optimizer = AdamNorm(model.parameters(), lr=1e-3)
    batches = []
    for gripper_rate in (0.5, 0.0, 0.5):
        n = 24
        batches.append(
            {
                "obs": torch.randn(n, 12),
                "arm_action": torch.randn(n, 6).clamp(-1, 1),
                "gripper_action": torch.randint(0, 2, (n,)),
                "gripper_mask": (torch.rand(n) < gripper_rate).float(),
            }
        )
    return SimpleNamespace(model=model, optimizer=optimizer, batch=batches)


def bc_loss(model, batch):
    arm, gripper = model(batch["obs"])
    arm_loss = F.mse_loss(arm, batch["arm_action"])
    ce = F.cross_entropy(gripper, batch["gripper_action"], reduction="none")
    mask = batch["gripper_mask"]
    gripper_loss = (ce * mask).sum() / mask.sum().clamp(min=1.0)
    return arm_loss + 0.2 * gripper_loss


def run(s=None):
    s = s or build()
    losses = []
    for batch in s.batch:
        loss = bc_loss(s.model, batch)
        s.optimizer.zero_grad(set_to_none=False)
        loss.backward()
        s.optimizer.step()
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    print(run())
