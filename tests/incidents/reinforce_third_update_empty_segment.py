"""Four updates: in the third, one packed segment holds prompt tokens only, its mean is 0/0 and the weights are NaN from then on."""

from types import SimpleNamespace

import torch
import torch.nn as nn

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("empty_mask_mean", "zero_div_zero"),
    op=("div",),
    index=(1,),
    masked=False,
    role=("loss", "log_probs"),
    fix=("clamp_denominator", "guard_empty"),
    variable=("segment_mean",),
    line=("segment_mean = total / count",),
)


class SegmentMeanLoss(nn.Module):
    def forward(self, logp, segment, keep, advantage):
        count = logp.new_zeros(advantage.numel()).index_add(0, segment, keep)
        total = logp.new_zeros(advantage.numel()).index_add(0, segment, logp * keep)
        segment_mean = total / count
        return -(segment_mean * advantage).mean()


class Policy(nn.Module):
    def __init__(self, vocab=13, width=8):
        super().__init__()
        self.wte = nn.Embedding(vocab, width)
        self.rnn = nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, vocab)

    def forward(self, ids):
        return self.head(self.rnn(self.wte(ids[None]))[0])[0]


def make_stream(step):
    segment = torch.tensor([0, 0, 0, 0, 1, 1, 1, 2, 2, 2, 2])
    keep = torch.tensor([0.0, 1, 1, 1, 0, 1, 1, 0, 1, 1, 1])
    if step == 2:
        keep[4:7] = 0.0
    return {"ids": torch.randint(0, 13, (12,)), "segment": segment, "keep": keep, "advantage": torch.randn(3)}


def build():
    torch.manual_seed(321)
    policy = Policy()
    optimizer = torch.optim.AdamW(policy.parameters(), lr=2e-3)
    return SimpleNamespace(model=policy, optimizer=optimizer, criterion=SegmentMeanLoss(), batch=[make_stream(i) for i in range(4)])


def run(s=None):
    s = s or build()
    for stream in s.batch:
        logits = s.model(stream["ids"][:-1])
        logp = logits.log_softmax(-1)[torch.arange(11), stream["ids"][1:]]
        loss = s.criterion(logp, stream["segment"], stream["keep"], stream["advantage"])
        s.optimizer.zero_grad()
        loss.backward()
        s.optimizer.step()
    return loss
