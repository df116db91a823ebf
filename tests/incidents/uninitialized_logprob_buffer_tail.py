"""Old log-probs are collected into torch.empty by whole micro-batches; the last, shorter one is skipped and its rows
are never written.
"""

from types import SimpleNamespace

import torch
from torch import nn

from expected import Expected

EXPECTED = Expected(
    phase=("forward", "input"),
    cause=("uninitialized",),
    op=("empty", "new_empty", "uninitialized", "empty_like"),
    index=(6, 0),
    masked=None,
    role=("old_log_probs", "log_probs"),
    fix=("initialise_memory", "fix_upstream"),
    variable=("buffer",),
    line=("buffer = torch.empty(ids.shape[0], ids.shape[1] - 1)",),
)


def logps(policy, ids):
    table = policy(ids[:, :-1]).log_softmax(dim=-1)
    return table.gather(dim=-1, index=ids[:, 1:, None]).squeeze(-1)


@torch.no_grad()
def collect_old(policy, ids, micro=3):
    buffer = torch.empty(ids.shape[0], ids.shape[1] - 1)
    for k in range(ids.shape[0] // micro):
        rows = slice(k * micro, (k + 1) * micro)
        buffer[rows] = logps(policy, ids[rows])
    return buffer


def build():
    torch.manual_seed(121)
    torch.use_deterministic_algorithms(True)  # fresh memory then has a fixed content: NaN
    policy = nn.Sequential(nn.Embedding(16, 8), nn.Linear(8, 16))
    ids = torch.randint(0, 16, (8, 6))
    advantages = torch.tensor([0.1, -0.4, 0.9, -0.2, 0.3, -0.8, 0.6, -0.5])
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-4)
    return SimpleNamespace(model=policy, optimizer=optimizer, batch=SimpleNamespace(ids=ids, advantages=advantages))


def run(s=None):
    s = s or build()
    b = s.batch
    old = collect_old(s.model, b.ids)
    new = logps(s.model, b.ids)
    ratio = torch.exp(new - old)
    gain = torch.min(ratio * b.advantages[:, None], ratio.clamp(0.8, 1.2) * b.advantages[:, None])
    loss = -gain.mean(dim=1).mean()
    s.optimizer.zero_grad()
    loss.backward()
    s.optimizer.step()
    return loss
