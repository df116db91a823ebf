"""Scores are whitened in place in fp16 with eps 1e-8, which is 0 there; the prompt whose samples all score the same divides 0 by 0."""

from types import SimpleNamespace

import torch
import torch.nn as nn

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("eps_underflow", "zero_div_zero"),
    op=("div",),
    index=(2, 0),
    masked=False,
    role=("advantages", "rewards"),
    fix=("representable_eps", "upcast_fp32", "clamp_denominator"),
    variable=("scores",),
    line=("scores.div_(scores.std(dim=1, keepdim=True) + eps)",),
)


class Policy(nn.Module):
    def __init__(self, vocab=11, width=6):
        super().__init__()
        self.emb = nn.Embedding(vocab, width)
        self.cell = nn.GRUCell(width, width)
        self.out = nn.Linear(width, vocab)

    def forward(self, ids):
        state, steps = torch.zeros(ids.shape[0], 6), []
        for t in range(ids.shape[1]):
            state = self.cell(self.emb(ids[:, t]), state)
            steps.append(self.out(state))
        return torch.stack(steps, dim=1)


@torch.no_grad()
def whiten_(scores, eps=1e-8):
    scores.sub_(scores.mean(dim=1, keepdim=True))
    scores.div_(scores.std(dim=1, keepdim=True) + eps)
    return scores


def build():
    torch.manual_seed(336)
    policy = Policy()
    scores = torch.tensor([[0.25, 1.0, 0.5], [1.0, 0.0, 0.0], [0.75, 0.75, 0.75], [0.0, 0.5, 1.0]], dtype=torch.float16)
    batch = {"ids": torch.randint(0, 11, (12, 5)), "scores": scores}
    return SimpleNamespace(model=policy, optimizer=torch.optim.AdamW(policy.parameters(), lr=1e-3), batch=batch)


def run(s=None):
    s = s or build()
    ids = s.batch["ids"]
    adv = whiten_(s.batch["scores"].clone()).flatten().float()
    logp = s.model(ids[:, :-1]).log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)
    loss = -(logp.mean(1) * adv).mean()
    loss.backward()
    s.optimizer.step()
    return loss
