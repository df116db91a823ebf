"""LMFlow, src/lmflow/optim/sophia.py, SophiaG.step
(https://github.com/OptimalScale/LMFlow/blob/main/src/lmflow/optim/sophia.py): this port divides by sqrt(hessian) + rho and lets rho be 0. The
Hessian estimate is refreshed every tenth step only, so with rho=0 the first reward-model step divides by zero; loss and gradients are fine.

Heals: a positive rho, or a clamped denominator. Does not heal: refresh the Hessian before the first step, the rows of tokens that the batch
does not contain have no gradient and keep a Hessian of zero (weight decay gives them an update all the same).
"""

from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.optim.optimizer import Optimizer

from expected import Expected

EXPECTED = Expected(
    phase=("optimizer",),
    cause=("zero_denominator", "zero_div_zero"),
    op=("addcdiv_", "addcdiv"),
    index=(0, 0),
    masked=None,
    role=("optimizer", "weights"),
    fix=("validate_config", "clamp_denominator", "representable_eps"),
    variable=("p", "embed_tokens.weight", None),
    line=('p.addcdiv_(update, h_sqrt, value=-group["lr"])',),
)


class SophiaG(Optimizer):
    def __init__(self, params, lr=1e-4, betas=(0.965, 0.99), rho=0.04, weight_decay=1e-1):
        if not 0.0 <= lr:
            raise ValueError(f"Invalid learning rate: {lr}")
        if not 0.0 <= rho:
            raise ValueError(f"Invalid rho parameter: {rho}")
        super().__init__(params, dict(lr=lr, betas=betas, rho=rho, weight_decay=weight_decay))

    def _state(self, p):
        state = self.state[p]
        if len(state) == 0:
            state["step"] = 0
            state["exp_avg"] = torch.zeros_like(p)
            state["hessian"] = torch.zeros_like(p)
        return state

    @torch.no_grad()
    def update_hessian(self):
        for group in self.param_groups:
            beta2 = group["betas"][1]
            for p in group["params"]:
                if p.grad is not None:
                    self._state(p)["hessian"].mul_(beta2).addcmul_(p.grad, p.grad, value=1 - beta2)

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            beta1 = group["betas"][0]
            for p in group["params"]:
                if p.grad is None:
                    continue
                grad, state = p.grad, self._state(p)
                exp_avg, h = state["exp_avg"], state["hessian"]
                if group["weight_decay"] != 0:
                    grad = grad.add(p, alpha=group["weight_decay"])
                exp_avg.mul_(beta1).add_(grad, alpha=1 - beta1)
                state["step"] += 1
                update = exp_avg.div(1 - beta1 ** state["step"])
                h_sqrt = h.sqrt().add_(group["rho"])
                p.addcdiv_(update, h_sqrt, value=-group["lr"])


class RewardModel(nn.Module):
    def __init__(self, vocab=26, dim=10):
        super().__init__()
        self.embed_tokens = nn.Embedding(vocab, dim)
        self.fc = nn.Linear(dim, dim)
        self.score = nn.Linear(dim, 1, bias=False)

    def forward(self, input_ids):
        return self.score(torch.tanh(self.fc(self.embed_tokens(input_ids))).mean(1)).squeeze(-1)


def build(hessian_interval=10):
    torch.manual_seed(545)
    model = RewardModel()
    optimizer = SophiaG(model.parameters(), lr=1e-5, rho=0.0)
    chosen, rejected = torch.randint(1, 20, (4, 6)), torch.randint(1, 20, (4, 6))
    return SimpleNamespace(model=model, optimizer=optimizer, chosen=chosen, rejected=rejected, hessian_interval=hessian_interval)


def run(s=None):
    s = s or build()
    for step in range(1, 3):
        loss = -F.logsigmoid(s.model(s.chosen) - s.model(s.rejected)).mean()
        s.optimizer.zero_grad()
        loss.backward()
        if step % s.hessian_interval == 0:
            s.optimizer.update_hessian()
        s.optimizer.step()
    return loss


if __name__ == "__main__":
    print(run().item())
