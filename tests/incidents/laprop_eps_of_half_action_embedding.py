"""LaProp, the optimizer of DreamerV3, divides the gradient by sqrt(v) + eps before the momentum; DreamerV3 sets eps = 1e-20. With
the actor kept in half precision 1e-20 rounds to 0: a row of the action embedding that the batch never uses has gradient 0 and
v = 0, and the update is 0/0. Loss and gradients are finite; the row is NaN after the step and everything in the next.

    https://github.com/Z-T-WANG/LaProp-Optimizer/blob/master/laprop.py
    (eps 1e-20: https://github.com/danijar/dreamerv3)

Heals: an eps that half precision has (1e-6), a floor for the denominator, doing the update in fp32.
Does not heal: clipping of gradients, a smaller learning rate.
"""

from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F

from expected import Expected

EXPECTED = Expected(
    phase=("optimizer",),
    cause=("eps_underflow", "zero_div_zero"),
    op=("div",),
    index=(0, 0),
    masked=None,
    role=("optimizer", "weights", "grad"),
    fix=("representable_eps", "upcast_fp32", "clamp_denominator", "clamp_input"),
    variable=("update",),
    line=("update = p.grad / denom",),
)


class LaProp(torch.optim.Optimizer):
    def __init__(self, params, lr=4e-5, betas=(0.9, 0.99), eps=1e-20):
        super().__init__(params, dict(lr=lr, betas=betas, eps=eps))

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
                state["exp_avg_sq"].mul_(beta2).addcmul_(p.grad, p.grad, value=1 - beta2)
                bias_correction = 1 - beta2 ** state["step"]
                denom = (state["exp_avg_sq"] / bias_correction).sqrt().add_(group["eps"])
                update = p.grad / denom
                state["exp_avg"].mul_(beta1).add_(update, alpha=1 - beta1)
                p.add_(state["exp_avg"], alpha=-group["lr"] / (1 - beta1 ** state["step"]))


class RewardHead(nn.Module):
    """Reward of an imagined step from the latent and the action before it."""

    def __init__(self, actions=6, dim=4):
        super().__init__()
        self.action_embed = nn.Embedding(actions, dim)
        self.out = nn.Linear(dim, 1)

    def forward(self, latent, action):
        return self.out(torch.tanh(latent + self.action_embed(action))).squeeze(-1)


def build():
    torch.manual_seed(40)
    model = RewardHead().half()
    nn.init.constant_(model.out.weight, 0.5)
    latent = (0.3 * torch.randn(12, 4)).half()
    action = torch.tensor([1, 2, 3, 5, 1, 2, 3, 5, 1, 2, 3, 5])  # no-op (0) and 4 were not taken
    reward = torch.full((12,), 4.0, dtype=torch.float16)
    return SimpleNamespace(model=model, latent=latent, action=action, reward=reward, optimizer=LaProp(model.parameters(), lr=1e-3))


def run(s=None):
    s = s or build()
    loss = F.mse_loss(s.model(s.latent, s.action).float(), s.reward.float())
    s.optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(s.model.parameters(), 100.0)
    s.optimizer.step()
    return loss


if __name__ == "__main__":
    run()
