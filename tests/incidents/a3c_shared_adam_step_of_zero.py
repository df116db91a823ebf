"""pytorch-a3c SharedAdam - the step counter lives in shared memory, and only the rank 0 worker counts it up.

Someone saw the counter run N times too fast with N workers and let rank 0 alone increment it. Worker 3 finishes its first rollout before rank 0
does: the counter is still 0, both bias corrections are 1 - beta ** 0 = 0, step_size is lr * 0 / 0 = NaN, and the shared model is lost for all
workers. Loss and gradients are finite.
Source: https://github.com/ikostrikov/pytorch-a3c/blob/master/my_optim.py
Heals: count before use (as the original does), or a counter of at least 1. Does not: a larger eps in the denominator, clipping gradients.
"""

import torch
import torch.nn as nn
from types import SimpleNamespace

from expected import Expected

EXPECTED = Expected(
    phase=("optimizer",),
    cause=("zero_div_zero", "zero_denominator"),
    op=("div",),
    index=(0,),
    masked=None,
    role=("optimizer",),
    fix=("clamp_denominator", "fix_upstream", "avoid_singular_op", "clamp_input", "skip_bad_step"),
    variable=("step_size",),
    line=('step_size = group["lr"] * bias_correction2.sqrt() / bias_correction1',),
)

OBS, ACTIONS, T = 6, 3, 5


class SharedAdam(torch.optim.Optimizer):
    def __init__(self, params, lr=1e-4, betas=(0.9, 0.999), eps=1e-8):
        super().__init__(params, dict(lr=lr, betas=betas, eps=eps))
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p] = dict(step=torch.zeros(1), exp_avg=torch.zeros_like(p), exp_avg_sq=torch.zeros_like(p))

    @torch.no_grad()
    def step(self, rank=0):
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if rank == 0:
                    state["step"] += 1
                state["exp_avg"].mul_(beta1).add_(p.grad, alpha=1 - beta1)
                state["exp_avg_sq"].mul_(beta2).addcmul_(p.grad, p.grad, value=1 - beta2)
                denom = state["exp_avg_sq"].sqrt().add_(group["eps"])
                bias_correction1 = 1 - beta1 ** state["step"]
                bias_correction2 = 1 - beta2 ** state["step"]
                step_size = group["lr"] * bias_correction2.sqrt() / bias_correction1
                p.sub_(step_size * state["exp_avg"] / denom)


class ActorCritic(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(OBS, 16)
        self.actor_linear = nn.Linear(16, ACTIONS)
        self.critic_linear = nn.Linear(16, 1)

    def forward(self, x):
        h = torch.relu(self.body(x))
        return self.actor_linear(h), self.critic_linear(h).squeeze(-1)


def build():
    torch.manual_seed(30)
    shared_model = ActorCritic()
    optimizer = SharedAdam(shared_model.parameters())
    return SimpleNamespace(
        model=shared_model,
        optimizer=optimizer,
        rank=3,
        states=torch.randn(T, OBS),
        actions=torch.randint(0, ACTIONS, (T,)),
        rewards=torch.rand(T),
    )


def run(s=None):
    s = s or build()
    logits, values = s.model(s.states)
    log_probs = logits.log_softmax(-1)
    entropies = -(log_probs * log_probs.exp()).sum(-1)
    picked = log_probs.gather(-1, s.actions.unsqueeze(-1)).squeeze(-1)
    R, returns = 0.0, []
    for r in s.rewards.flip(0):
        R = r + 0.99 * R
        returns.append(R)
    returns = torch.stack(returns[::-1])
    advantages = returns - values
    policy_loss = -(picked * advantages.detach() + 0.01 * entropies).sum()
    loss = policy_loss + 0.5 * 0.5 * advantages.pow(2).sum()
    for p in s.model.parameters():
        p.grad = None
    loss.backward()
    nn.utils.clip_grad_norm_(s.model.parameters(), 50)
    s.optimizer.step(rank=s.rank)
    return loss


if __name__ == "__main__":
    print(run())
