"""SSS135/pytorch-rl-kit, ppo_pytorch/common/squash.py (the value rescaling of R2D2): the inverse squares its root. The target network runs in half
under autocast; at a rescaled Q of 326, a game score of about 67000, the square passes 65504 and the bootstrap target is inf.

https://github.com/SSS135/pytorch-rl-kit/blob/master/ppo_pytorch/common/squash.py
Casting the Q values to float32 before the inverse heals (only the transform: the network may stay in half). Casting the result, which is inf
already, does not; nor does clipping the gradient norm.
"""

from types import SimpleNamespace

import torch
import torch.nn as nn
from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("fp16_overflow",),
    op=("pow", "square"),
    index=(1, 2),
    masked=None,
    role=("hidden", "rewards", "logits"),
    fix=("upcast_fp32", "clamp_input"),
    variable=(None,),
    line=("return x.sign() * ((((1 + 4 * eps * (x.abs() + 1 + eps)).sqrt() - 1) / (2 * eps)) ** 2 - 1)",),
)


def squash(x, eps=0.001):
    return x.sign() * ((x.abs() + 1).sqrt() - 1) + eps * x


def unsquash(x, eps=0.001):
    return x.sign() * ((((1 + 4 * eps * (x.abs() + 1 + eps)).sqrt() - 1) / (2 * eps)) ** 2 - 1)


class RecurrentQ(nn.Module):
    def __init__(self, obs_dim=4, hidden=12, actions=3):
        super().__init__()
        self.encoder = nn.Linear(obs_dim, hidden)
        self.advantage = nn.Linear(hidden, actions)
        self.value = nn.Linear(hidden, 1)

    def forward(self, obs):
        h = torch.relu(self.encoder(obs))
        adv = self.advantage(h)
        return self.value(h) + adv - adv.mean(-1, keepdim=True)


def build():
    torch.manual_seed(2)
    q_net, target_net = RecurrentQ(), RecurrentQ()
    with torch.no_grad():  # late in training: the score so far lies in the bias of the value stream
        for net in (q_net, target_net):
            net.value.bias.fill_(268.0)
            net.value.weight.copy_(net.value.weight.abs() * 25.0)
    target_net.load_state_dict(q_net.state_dict())
    next_obs = torch.randn(2, 4, 4)
    next_obs[1, 2] = torch.tensor([9.0, -9.0, 9.0, 9.0])  # the bonus stage
    batch = dict(
        obs=torch.randn(2, 4, 4),
        next_obs=next_obs,
        actions=torch.randint(0, 3, (2, 4)),
        rewards=torch.rand(2, 4) * 100.0,
        dones=torch.zeros(2, 4),
        is_weights=torch.rand(2, 1) + 0.5,
    )
    return SimpleNamespace(
        model=q_net, target_net=target_net, batch=batch, gamma=0.997, optimizer=torch.optim.Adam(q_net.parameters(), lr=1e-4, eps=1e-3)
    )


def run(s=None):
    s = s or build()
    batch = s.batch
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.float16):
        next_q = s.target_net(batch["next_obs"]).max(-1).values
        next_value = unsquash(next_q)
    targets = squash(batch["rewards"] + s.gamma * (1 - batch["dones"]) * next_value.float())
    q = s.model(batch["obs"]).gather(-1, batch["actions"].unsqueeze(-1)).squeeze(-1)
    td_error = targets - q
    loss = (batch["is_weights"] * td_error.pow(2)).mean()
    s.optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(s.model.parameters(), 40.0)
    s.optimizer.step()
    return loss


if __name__ == "__main__":
    print(run())
