"""IQ-Learn with the Jensen-Shannon divergence: the weight of an expert transition is exp(-r) / (2 - exp(-r)), r = Q - gamma V'.

After an overestimated next state the recovered reward of one expert transition is about -95. exp(95) is inf in numerator and denominator, and
inf / -inf is NaN, although the quotient goes to -1. It is computed under no_grad and multiplies the reward in the loss.

Source: iq_learn/iq.py (iq_loss, div == "js") of https://github.com/Div99/IQ-Learn
Heals: 1 / (2 * exp(r) - 1), which is the same and goes to -1; a clamp of the exponent. Does not: + eps in the denominator (it is -inf, not 0), clamping the
loss, the gradient penalty, nan_to_num to 0 (drops the worst transition).
"""

from types import SimpleNamespace

import torch
from torch import nn

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("exp_overflow",),
    op=("exp",),
    index=(3, 0),
    masked=False,
    role=("is_weight", "hidden", "loss"),
    fix=("stable_function", "clamp_exponent", "clamp_input"),
    variable=(None,),
    line=("phi_grad = torch.exp(-reward) / (2 - torch.exp(-reward))",),
)


class SoftQNetwork(nn.Module):
    def __init__(self, obs_dim=6, n_actions=4, hidden=32):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(obs_dim, hidden), nn.ELU(), nn.Linear(hidden, n_actions))

    def forward(self, obs):
        return self.net(obs)


def get_v(q, alpha):
    return alpha * torch.logsumexp(q / alpha, dim=1, keepdim=True)


def iq_loss(s, current_Q, current_v, next_v, batch):
    _, _, _, done, is_expert = batch
    y = (1 - done) * s.gamma * next_v
    reward = (current_Q - y)[is_expert.squeeze(1)]
    with torch.no_grad():
        if s.div == "kl_fix":
            phi_grad = torch.exp(-reward)
        elif s.div == "js":
            phi_grad = torch.exp(-reward) / (2 - torch.exp(-reward))
        else:
            phi_grad = 1
    loss = -(phi_grad * reward).mean()
    loss = loss + (current_v - y).mean()
    return loss


def build():
    torch.manual_seed(4)
    model = SoftQNetwork()
    target = SoftQNetwork()
    target.load_state_dict(model.state_dict())
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    n = 12
    obs, next_obs = torch.randn(n, 6), torch.randn(n, 6)
    next_obs[6] *= 900.0  # the simulator kicked the body: velocities nobody has seen
    is_expert = torch.tensor([1, 0, 1, 1, 0, 0, 1, 1, 0, 1, 0, 0], dtype=torch.bool).unsqueeze(1)
    batch = (obs, next_obs, torch.randint(0, 4, (n, 1)), torch.zeros(n, 1), is_expert)
    return SimpleNamespace(model=model, target=target, optimizer=optimizer, batch=batch, gamma=0.99, alpha=0.1, div="js")


def run(s=None):
    s = s or build()
    losses = []
    for _ in range(2):
        obs, next_obs, action, _, _ = s.batch
        q = s.model(obs)
        with torch.no_grad():
            next_v = get_v(s.target(next_obs), s.alpha)
        loss = iq_loss(s, q.gather(1, action), get_v(q, s.alpha), next_v, s.batch)
        s.optimizer.zero_grad()
        loss.backward()
        s.optimizer.step()
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    print(run())
