"""Guided cost learning: the cost net is trained with mean(cost of demonstrations) + log mean(exp(-cost of samples) / q), the second term being an
importance-sampled partition function. The cost is unbounded, and for one sampled state (an observation that was not scaled) it falls below
-88.7: exp overflows, the loss is inf and the gradient of the cost net NaN.

Source: https://github.com/nishantkr18/guided-cost-learning/blob/master/main.py (loss_IOC). Heals: logsumexp(-cost - log q) - log n, or a clamp on
the exponent. Tempting and useless: a larger epsilon under the sampling probability, or clamping the mean before the log.
"""

from types import SimpleNamespace

import torch
import torch.nn as nn

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("exp_overflow",),
    op=("exp",),
    index=(7, 0),
    masked=None,
    role=("is_weight", "rewards", "ratio", "logits", "loss", "hidden"),
    fix=("stable_function", "clamp_exponent", "clamp_input", "fix_upstream", "drop_invalid_sample", "reject_input"),
    variable=(None,),
    line=("loss_IOC = torch.mean(costs_demo) + torch.log(torch.mean(torch.exp(-costs_samp) / (probs + 1e-7)))",),
)


class CostNN(nn.Module):
    def __init__(self, state_dim, hidden_dim1=32, out_features=1):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(state_dim, hidden_dim1), nn.ReLU(), nn.Linear(hidden_dim1, out_features))

    def forward(self, x):
        return self.net(x)


class PG(nn.Module):
    def __init__(self, state_dim, n_actions):
        super().__init__()
        self.model = nn.Sequential(nn.Linear(state_dim, 16), nn.ReLU(), nn.Linear(16, n_actions))

    @torch.no_grad()
    def predict_probs(self, states):
        return torch.softmax(self.model(states), dim=-1)


def preprocess_traj(states, actions, policy):
    """Rows of (state, probability of the action that was taken, action)."""
    probs = policy.predict_probs(states).gather(1, actions.long()[:, None])
    return torch.cat([states, probs, actions[:, None].float()], dim=1)


def build():
    torch.manual_seed(3)
    state_dim, n_actions = 4, 2
    policy, cost_f = PG(state_dim, n_actions), CostNN(state_dim + 1)
    with torch.no_grad():
        cost_f.net[2].weight.copy_(-cost_f.net[2].weight.abs())  # after some epochs the samples are cheap everywhere
    demo_states, samp_states = 0.3 * torch.randn(6, state_dim), 0.3 * torch.randn(10, state_dim)
    samp_states[7] = torch.tensor([2.4, -310.0, 0.2, 180.0])  # velocities of one episode in degrees, not radians
    D_demo = preprocess_traj(demo_states, torch.randint(0, n_actions, (6,)), policy)
    D_samp = preprocess_traj(samp_states, torch.randint(0, n_actions, (10,)), policy)
    D_samp[7, -2] = 0.37  # the probability that the sampler stored
    return SimpleNamespace(
        model=cost_f, policy=policy, D_demo=D_demo, D_samp=D_samp, optimizer=torch.optim.Adam(cost_f.parameters(), 1e-2, weight_decay=1e-4)
    )


def run(s=None):
    s = s or build()
    states, probs, actions = s.D_samp[:, :-2], s.D_samp[:, -2:-1], s.D_samp[:, -1:]
    states_expert, actions_expert = s.D_demo[:, :-2], s.D_demo[:, -1:]
    costs_samp = s.model(torch.cat((states, actions), dim=-1))
    costs_demo = s.model(torch.cat((states_expert, actions_expert), dim=-1))
    loss_IOC = torch.mean(costs_demo) + torch.log(torch.mean(torch.exp(-costs_samp) / (probs + 1e-7)))
    s.optimizer.zero_grad()
    loss_IOC.backward()
    s.optimizer.step()
    return loss_IOC
