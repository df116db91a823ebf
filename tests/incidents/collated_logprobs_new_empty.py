"""The collator pads behaviour log-probs into new_empty memory and relies on the mask product to hide the tail."""

from types import SimpleNamespace

import torch
import torch.nn as nn

from expected import Expected

EXPECTED = Expected(
    phase=("input", "forward"),
    cause=("uninitialized", "nan_times_zero_mask"),
    op=("new_empty", "empty"),
    index=(0, 4),
    masked=True,
    role=("old_log_probs", "rollout_log_probs"),
    fix=("initialise_memory", "mask_before_op"),
    variable=("padded",),
    line=("padded = rows[0].new_empty((len(rows), width))",),
)


def collate(rows, width):
    padded = rows[0].new_empty((len(rows), width))
    mask = torch.zeros(len(rows), width)
    for i, row in enumerate(rows):
        padded[i, : len(row)] = row
        mask[i, : len(row)] = 1.0
    return padded, mask


class Policy(nn.Module):
    def __init__(self, vocab=12, width=6):
        super().__init__()
        self.emb = nn.Embedding(vocab, width)
        self.head = nn.Linear(width, vocab)

    def forward(self, ids):
        return self.head(self.emb(ids)).log_softmax(-1)


def build():
    torch.manual_seed(343)
    torch.use_deterministic_algorithms(True)  # reproducible runs
    policy = Policy()
    rows = [-torch.rand(n) * 3 for n in (4, 7, 6)]
    batch = {"ids": torch.randint(0, 12, (3, 8)), "behaviour": rows, "adv": torch.tensor([0.7, -0.2, 1.1])}
    return SimpleNamespace(model=policy, optimizer=torch.optim.AdamW(policy.parameters(), lr=1e-4), batch=batch)


def run(s=None):
    s = s or build()
    ids = s.batch["ids"]
    old, mask = collate(s.batch["behaviour"], width=7)
    logp = s.model(ids[:, :-1]).gather(-1, ids[:, 1:, None]).squeeze(-1)
    ratio = (logp - old).exp()
    gain = torch.minimum(ratio * s.batch["adv"][:, None], ratio.clamp(0.8, 1.2) * s.batch["adv"][:, None])
    loss = -(gain * mask).sum() / mask.sum()
    s.optimizer.zero_grad()
    loss.backward()
    s.optimizer.step()
    return loss
