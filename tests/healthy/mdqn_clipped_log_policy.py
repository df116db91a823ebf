"""Healthy. Munchausen DQN: the log-policy of the taken action is -inf, and alpha * clip(tau * log pi, l_0, 0) makes -1 of it.

With tau = 0.03 the softmax of Q / tau is exactly 0 for an action that is worth 4 less than the best, and its log is -inf. The bonus is computed under no_grad
and clipped from below at l_0 = -1, which is what the paper wants of it; the soft value of the next state is tau * logsumexp and never multiplies 0 by
the -inf. Only the finite target enters the loss.

Source: https://github.com/pfnet/pfrl/blob/master/pfrl/agents/mdqn.py and https://github.com/BY571/Munchausen-RL; paper arXiv 2007.14430
"""

from types import SimpleNamespace

import torch
from torch import nn
from torch.nn import functional as F


class QNetwork(nn.Module):
    def __init__(self, obs_dim=8, n_actions=5, hidden=48):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(obs_dim, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, n_actions))

    def forward(self, obs):
        return self.net(obs)


def build():
    torch.manual_seed(2007)
    model, target = QNetwork(), QNetwork()
    with torch.no_grad():
        model.net[-1].bias.copy_(torch.tensor([5.0, 1.0, -2.0, 4.9, 0.0]))
    target.load_state_dict(model.state_dict())
    n = 32
    batch = {
        "obs": torch.randn(n, 8),
        "action": torch.randint(0, 5, (n, 1)),
        "reward": torch.randn(n, 1),
        "next_obs": torch.randn(n, 8),
        "done": (torch.rand(n, 1) < 0.1).float(),
    }
    return SimpleNamespace(
        model=model,
        target=target,
        optimizer=torch.optim.Adam(model.parameters(), lr=5e-4),
        batch=batch,
        gamma=0.99,
        tau=0.03,
        alpha=0.9,
        l_0=-1.0,
    )


@torch.no_grad()
def munchausen_target(s):
    b = s.batch
    pi = F.softmax(s.target(b["obs"]) / s.tau, dim=1)
    tau_log_pi = s.tau * torch.log(pi).gather(1, b["action"])
    munchausen_bonus = s.alpha * tau_log_pi.clamp(min=s.l_0, max=0.0)
    next_q = s.target(b["next_obs"])
    soft_value = s.tau * torch.logsumexp(next_q / s.tau, dim=1, keepdim=True)
    return b["reward"] + munchausen_bonus + s.gamma * (1.0 - b["done"]) * soft_value


def run(s=None):
    s = s or build()
    losses = []
    for _ in range(3):
        q = s.model(s.batch["obs"]).gather(1, s.batch["action"])
        loss = F.smooth_l1_loss(q, munchausen_target(s))
        s.optimizer.zero_grad()
        loss.backward()
        s.optimizer.step()
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    print(run())
