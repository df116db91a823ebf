"""Group advantages are normalised in float16, where the epsilon 1e-8 is 0; a group with equal rewards divides 0 by 0."""

from types import SimpleNamespace

import torch
from torch import nn

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("eps_underflow", "zero_div_zero"),
    op=("div",),
    index=(0, 2),
    masked=None,
    role=("advantages",),
    fix=("upcast_fp32", "representable_eps", "clamp_denominator", "clamp_input", "guard_empty"),
    variable=("scores",),
    line=("scores = scores / (width + eps)",),
)


def whiten_columns(scores, eps=1e-8):
    """scores: [G, B], one column per prompt."""
    scores = scores - scores.mean(dim=0)
    width = scores.square().mean(dim=0).sqrt()
    scores = scores / (width + eps)
    return scores


class Policy(nn.Module):
    def __init__(self, vocab=15, width=6):
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.rnn = nn.GRU(width, width, batch_first=True)
        self.lm_head = nn.Linear(width, vocab)

    def logps(self, ids):
        hidden, _ = self.rnn(self.embed(ids[:, :-1]))
        return -nn.functional.cross_entropy(self.lm_head(hidden).transpose(1, 2), ids[:, 1:], reduction="none")


def build():
    torch.manual_seed(115)
    policy = Policy()
    rewards = torch.tensor(
        [[1.0, 0.0, 1.0, 0.5], [0.0, 0.0, 1.0, 0.0], [0.0, 1.0, 1.0, 1.0], [1.0, 0.0, 1.0, 0.25]],
        dtype=torch.float16,
    )
    ids = torch.randint(0, 15, (4, 4, 9))
    return SimpleNamespace(model=policy, optimizer=torch.optim.AdamW(policy.parameters(), lr=1e-5), batch=(ids, rewards))


def run(s=None):
    s = s or build()
    ids, rewards = s.batch
    advantages = whiten_columns(rewards)
    logp = s.model.logps(ids.reshape(-1, ids.shape[-1])).view(4, 4, -1)
    loss = -(advantages.unsqueeze(-1) * logp).mean()
    loss.backward()
    s.optimizer.step()
    return loss
