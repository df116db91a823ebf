"""A packed token whose behaviour log-prob was logged as -95 gives exp(+92) in the PPO ratio, and the negative
advantage keeps it unclipped."""

from types import SimpleNamespace

import torch
import torch.nn as nn

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("exp_overflow",),
    op=("exp",),
    index=(11,),
    masked=False,
    role=("ratio",),
    fix=("clamp_exponent",),
    variable=("prob_ratio",),
    line=("prob_ratio = torch.exp(delta)",),
)


class PackedActor(nn.Module):
    def __init__(self, vocab=23, dim=12):
        super().__init__()
        self.tok = nn.Embedding(vocab, dim)
        self.rnn = nn.GRU(dim, dim, batch_first=True)
        self.out = nn.Linear(dim, vocab)

    def forward(self, flat_ids, cu_seqlens):
        chunks = []
        for lo, hi in zip(cu_seqlens[:-1], cu_seqlens[1:]):
            states, _ = self.rnn(self.tok(flat_ids[lo:hi])[None])
            chunks.append(self.out(states[0]))
        return torch.cat(chunks)


class ClippedSurrogate(nn.Module):
    def __init__(self, low=0.2, high=0.28):
        super().__init__()
        self.low, self.high = low, high

    def forward(self, new_lp, old_lp, adv, counted):
        delta = new_lp - old_lp
        prob_ratio = torch.exp(delta)
        plain = -adv * prob_ratio
        clipped = -adv * prob_ratio.clamp(1 - self.low, 1 + self.high)
        worst = torch.maximum(plain, clipped)
        return worst[counted].mean()


def build():
    torch.manual_seed(311)
    model = PackedActor()
    cu_seqlens = [0, 5, 14, 18]
    flat_ids = torch.randint(0, 23, (18,))
    targets = torch.randint(0, 23, (18,))
    with torch.no_grad():
        lp = model(flat_ids, cu_seqlens).log_softmax(-1).gather(1, targets[:, None])[:, 0]
    old_lp = lp + 0.05 * torch.randn(18)
    old_lp[11] = -95.0
    counted = torch.ones(18, dtype=torch.bool)
    counted[[0, 1, 5, 6, 14]] = False
    adv = torch.cat([torch.full((5,), 0.8), torch.full((9,), -1.1), torch.full((4,), 0.3)])
    batch = dict(flat_ids=flat_ids, targets=targets, cu_seqlens=cu_seqlens, old_lp=old_lp, counted=counted, adv=adv)
    return SimpleNamespace(model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-4), batch=batch, objective=ClippedSurrogate())


def run(s=None):
    s = s or build()
    b = s.batch
    s.optimizer.zero_grad()
    lp = s.model(b["flat_ids"], b["cu_seqlens"]).log_softmax(-1).gather(1, b["targets"][:, None])[:, 0]
    loss = s.objective(lp, b["old_lp"], b["adv"], b["counted"])
    loss.backward()
    nn.utils.clip_grad_norm_(s.model.parameters(), 1.0)
    s.optimizer.step()
    return loss
