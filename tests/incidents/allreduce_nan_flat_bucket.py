"""Replica 1 takes the log of a probability that underflowed to 0; the flat bucket average hands its NaN and inf to
every other replica.
"""

from types import SimpleNamespace

import torch
from torch import nn

from expected import Expected

EXPECTED = Expected(
    phase=("forward", "backward"),
    cause=("allreduce_nan", "log_zero"),
    op=("log",),
    index=(3, 2),
    masked=None,
    role=("log_probs", "loss", "grad"),
    fix=("stable_function", "clamp_input", "skip_bad_step", "clamp_denominator"),
    variable=("logp",),
    line=("logp = torch.log(probs)",),
)


class Replica(nn.Module):
    def __init__(self, width=5, actions=4):
        super().__init__()
        self.layer = nn.Linear(width, 8)
        self.pi = nn.Linear(8, actions)

    def forward(self, obs):
        return self.pi(torch.relu(self.layer(obs)))


def bucket_of(module):
    return torch.cat([p.grad.reshape(-1) for p in module.parameters()])


def scatter_bucket(module, bucket):
    offset = 0
    for p in module.parameters():
        p.grad = bucket[offset : offset + p.numel()].view_as(p).clone()
        offset += p.numel()


def average(replicas):
    bucket = torch.zeros_like(bucket_of(replicas[0]))
    for replica in replicas:
        bucket += bucket_of(replica)
    bucket /= len(replicas)
    for replica in replicas:
        scatter_bucket(replica, bucket)


def local_loss(replica, obs, action, adv):
    probs = replica(obs).softmax(dim=-1)
    logp = torch.log(probs)
    return -(adv * logp.gather(1, action[:, None]).squeeze(1)).mean()


def build():
    torch.manual_seed(133)
    first = Replica()
    replicas = [first, Replica(), Replica()]
    for other in replicas[1:]:
        other.load_state_dict(first.state_dict())
    obs = torch.randn(3, 6, 5)
    obs[1, 3] *= 160.0  # an unscaled observation on one worker
    with torch.no_grad():
        worst = int(first(obs[1])[3].argmin())
    action = torch.randint(0, 4, (3, 6))
    action[1, 3] = worst
    optimizers = [torch.optim.Adam(r.parameters(), lr=1e-3) for r in replicas]
    return SimpleNamespace(
        model=first, replicas=replicas, optimizer=optimizers[0], optimizers=optimizers, batch=(obs, action, torch.randn(3, 6))
    )


def run(s=None):
    s = s or build()
    losses = []
    for replica, obs, action, adv in zip(s.replicas, *s.batch, strict=True):
        replica.zero_grad()
        loss = local_loss(replica, obs, action, adv)
        loss.backward()
        losses.append(loss.detach())
    average(s.replicas)
    for optimizer in s.optimizers:
        optimizer.step()
    return losses[0]
