"""IC3Net / CommNet - the mean message divides by the number of living agents minus one, and one agent is the last of its team.

The original divides only `if num_agents_alive > 1`, a Python test of one environment. Here the environments are batched and the test is gone:
in environment 1 only agent 0 is alive, nobody talks to it, its mean message is 0 / 0 = NaN, and so is its action.
Source: https://github.com/IC3Net/IC3Net/blob/master/comm.py (comm_mode "avg").
Heals: (alive - 1).clamp(min=1). Does not: torch.where(alive > 1, comm / (alive - 1), 0): the loss is finite and the gradient 0 / 0.
"""

from types import SimpleNamespace

import torch
import torch.nn as nn

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("zero_div_zero", "empty_mask_mean"),
    op=("div",),
    index=(1, 0, 0),
    masked=False,
    role=("hidden",),
    fix=("clamp_denominator", "guard_empty", "guard_small_group", "representable_eps", "avoid_singular_op"),
    variable=("comm",),
    line=("comm = messages.sum(dim=2) / (num_agents_alive - 1)",),
)

ENVS, AGENTS, OBS, HID, ACTIONS = 3, 4, 5, 8, 4


class CommNetMLP(nn.Module):
    def __init__(self, comm_passes=2):
        super().__init__()
        self.comm_passes = comm_passes
        self.encoder = nn.Linear(OBS, HID)
        self.f_modules = nn.ModuleList([nn.Linear(HID, HID) for _ in range(comm_passes)])
        self.c_modules = nn.ModuleList([nn.Linear(HID, HID) for _ in range(comm_passes)])
        self.head = nn.Linear(HID, ACTIONS)
        self.value_head = nn.Linear(HID, 1)
        self.register_buffer("comm_mask", torch.ones(AGENTS, AGENTS) - torch.eye(AGENTS))

    def communicate(self, hidden_state, alive_mask):
        talks = self.comm_mask * alive_mask[:, None, :] * alive_mask[:, :, None]  # (B, receiver, sender)
        num_agents_alive = alive_mask.sum(dim=1).view(-1, 1, 1)
        messages = hidden_state[:, None, :, :] * talks.unsqueeze(-1)
        comm = messages.sum(dim=2) / (num_agents_alive - 1)
        return comm

    def forward(self, x, alive_mask):
        x = torch.tanh(self.encoder(x))
        hidden_state = x
        for f, c in zip(self.f_modules, self.c_modules):
            hidden_state = torch.tanh(x + f(hidden_state) + c(self.communicate(hidden_state, alive_mask)))
        return self.head(hidden_state).log_softmax(-1), self.value_head(hidden_state).squeeze(-1)


def build():
    torch.manual_seed(3)
    policy_net = CommNetMLP()
    alive_mask = torch.ones(ENVS, AGENTS)
    alive_mask[1, 1:] = 0.0
    alive_mask[2, 3] = 0.0
    batch = SimpleNamespace(
        obs=torch.randn(ENVS, AGENTS, OBS),
        action=torch.randint(0, ACTIONS, (ENVS, AGENTS)),
        returns=torch.randn(ENVS, AGENTS),
        alive_mask=alive_mask,
    )
    optimizer = torch.optim.RMSprop(policy_net.parameters(), lr=1e-3, alpha=0.97, eps=1e-6)
    return SimpleNamespace(model=policy_net, optimizer=optimizer, batch=batch)


def run(s=None):
    s = s or build()
    b = s.batch
    log_p_a, values = s.model(b.obs, b.alive_mask)
    advantages = b.returns - values.detach()
    action_log_prob = log_p_a.gather(-1, b.action.unsqueeze(-1)).squeeze(-1)
    alive = b.alive_mask.bool()
    action_loss = -(advantages * action_log_prob)[alive].sum()
    value_loss = (values - b.returns).pow(2)[alive].sum()
    loss = (action_loss + 0.01 * value_loss) / alive.sum()
    s.optimizer.zero_grad()
    loss.backward()
    s.optimizer.step()
    return loss


if __name__ == "__main__":
    print(run())
