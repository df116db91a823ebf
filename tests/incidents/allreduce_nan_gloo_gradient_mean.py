"""The shard of one data-parallel group member holds a single sample whose unbiased std is NaN; the gloo all-reduce
gives the NaN to both.
"""

from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch import nn

from expected import Expected

EXPECTED = Expected(
    phase=("forward", "backward"),
    cause=("allreduce_nan", "std_single"),
    op=("std", "var"),
    index=(),
    masked=None,
    role=("advantages", "rewards", "grad"),
    fix=("guard_small_group", "skip_bad_step", "guard_empty"),
    variable=("spread",),
    line=("spread = rewards.std()",),
)


class Policy(nn.Module):
    def __init__(self, vocab=11, width=6):
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.head = nn.Linear(width, vocab)

    def forward(self, ids):
        return self.head(self.embed(ids)).log_softmax(-1)


def normalised(rewards):
    spread = rewards.std()
    return (rewards - rewards.mean()) / (spread + 1e-4)


def local_backward(policy, ids, rewards):
    taken = policy(ids[:, :-1]).gather(-1, ids[:, 1:].unsqueeze(-1)).squeeze(-1).sum(-1)
    loss = -(normalised(rewards) * taken).mean()
    loss.backward()
    return loss.detach()


def sync_gradients(members):
    """Sum over the members on this host, then over hosts, then divide by the number of members."""
    for group in zip(*(m.parameters() for m in members), strict=True):
        shared = torch.stack([p.grad for p in group]).sum(0)
        dist.all_reduce(shared, op=dist.ReduceOp.SUM)
        shared /= len(members) * dist.get_world_size()
        for p in group:
            p.grad.copy_(shared)


def build():
    torch.manual_seed(134)
    members = [Policy(), Policy()]
    members[1].load_state_dict(members[0].state_dict())
    ids = torch.randint(0, 11, (6, 7))
    rewards = torch.tensor([0.0, 1.0, 0.5, 1.0, 0.0, 1.0])
    shards = [(ids[:5], rewards[:5]), (ids[5:], rewards[5:])]
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.05) for m in members]
    return SimpleNamespace(model=members[0], members=members, optimizer=optimizers[0], optimizers=optimizers, batch=shards)


def run(s=None):
    s = s or build()
    started = not dist.is_initialized()
    if started:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    losses = [local_backward(member, *shard) for member, shard in zip(s.members, s.batch, strict=True)]
    sync_gradients(s.members)
    for optimizer in s.optimizers:
        optimizer.step()
    if started:
        dist.destroy_process_group()
    return losses[0]
