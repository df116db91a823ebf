"""Trajectory balance: an invalid object earns a reward of exactly 0 and its log is -inf, which the squared residual turns into inf.
Style of AugmentedDesignLab/junction-art, encodingGFN/gflownet/utils.py, trajectory_balance_loss (the recipe of Malkin et al. 2022).

Checked by hand: a floor under the reward before the log, or leaving the trajectory out, heals. nan_to_num or clamp(max=...) on the squared
residual gives a finite loss and NaN gradients (0 * inf in the square).
"""

from types import SimpleNamespace

import torch
import torch.nn as nn

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("log_zero",),
    op=("log",),
    index=(3,),
    masked=False,
    role=("rewards",),
    fix=("clamp_input", "drop_invalid_sample", "representable_eps"),
    variable=(None,),
    line=("rhs = torch.log(back_probs).sum(dim=1) + torch.log(rewards)",),
)


class GFlowNet(nn.Module):
    """Fills a row of slots from left to right; one way leads to each object, so the backward policy is 1."""

    def __init__(self, slots=4, symbols=3, hidden=16):
        super().__init__()
        self.slots, self.symbols = slots, symbols
        self.forward_policy = nn.Sequential(nn.Linear(slots * symbols, hidden), nn.Tanh(), nn.Linear(hidden, symbols))
        self.total_log_flow = nn.Parameter(torch.zeros(1))

    def probs(self, state):
        return torch.softmax(self.forward_policy(state), dim=-1)

    def forward(self, objects):
        n = objects.shape[0]
        state = torch.zeros(n, self.slots, self.symbols)
        fwd_probs = []
        for slot in range(self.slots):
            p = self.probs(state.flatten(1))
            fwd_probs.append(p.gather(1, objects[:, slot : slot + 1]))
            state = state.clone()
            state[torch.arange(n), slot, objects[:, slot]] = 1.0
        return torch.cat(fwd_probs, dim=1), torch.ones(n, self.slots)


def hidden_grammar_reward(objects):
    """Score of an object; a symbol 2 that follows a symbol 0 cannot be built and is worth nothing."""
    score = 0.5 + (objects == 1).float().sum(1)
    illegal = ((objects[:, :-1] == 0) & (objects[:, 1:] == 2)).any(dim=1)
    return torch.where(illegal, torch.zeros_like(score), score)


def trajectory_balance_loss(total_flow, rewards, fwd_probs, back_probs):
    lhs = torch.log(fwd_probs).sum(dim=1) + total_flow
    rhs = torch.log(back_probs).sum(dim=1) + torch.log(rewards)
    loss = (lhs - rhs) ** 2
    return loss.mean()


def build():
    torch.manual_seed(2201)
    model = GFlowNet()
    objects = torch.tensor([[1, 1, 0, 1], [2, 1, 0, 0], [2, 2, 1, 1], [1, 0, 2, 1], [0, 1, 2, 2], [1, 2, 1, 0]])
    optimizer = torch.optim.Adam([dict(params=model.forward_policy.parameters(), lr=5e-3), dict(params=[model.total_log_flow], lr=0.1)])
    return SimpleNamespace(model=model, optimizer=optimizer, batch=objects)


def run(s=None):
    s = s or build()
    rewards = hidden_grammar_reward(s.batch)
    fwd_probs, back_probs = s.model(s.batch)
    loss = trajectory_balance_loss(s.model.total_log_flow, rewards, fwd_probs, back_probs)
    s.optimizer.zero_grad()
    loss.backward()
    s.optimizer.step()
    return loss
