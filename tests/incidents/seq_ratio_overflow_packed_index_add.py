"""Log ratios of a packed batch are added up per sequence with index_add; one sequence drifts by about +130 nats and
its ratio is infinite."""

from types import SimpleNamespace

import torch
from torch import nn

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("seq_ratio_overflow", "exp_overflow"),
    op=("exp",),
    index=(3,),
    masked=False,
    role=("is_weight", "ratio"),
    fix=("clamp_exponent",),
    variable=("correction",),
    line=("correction = self.per_sequence(drift, owner).exp()",),
)


class NextToken(nn.Module):
    def __init__(self, n_vocab=30, width=8):
        super().__init__()
        self.inp = nn.Embedding(n_vocab, width)
        self.norm = nn.LayerNorm(width)
        self.out = nn.Linear(width, n_vocab, bias=False)

    def forward(self, tokens):
        return self.out(self.norm(self.inp(tokens)))


class SequenceISLoss(nn.Module):
    def __init__(self, num_sequences):
        super().__init__()
        self.num_sequences = num_sequences

    def per_sequence(self, flat, owner):
        return flat.new_zeros(self.num_sequences).index_add(0, owner, flat)

    def forward(self, train_lp, engine_lp, owner, advantage, trained):
        drift = (train_lp - engine_lp).detach().masked_fill(~trained, 0.0)
        correction = self.per_sequence(drift, owner).exp()
        weighted = correction[owner] * advantage[owner] * train_lp
        return -(weighted.masked_fill(~trained, 0.0)).sum() / trained.sum()


def build():
    torch.manual_seed(58)
    model = NextToken()
    lengths = torch.tensor([9, 30, 12, 50, 7])
    owner = torch.repeat_interleave(torch.arange(5), lengths)
    tokens = torch.randint(0, 30, (109,))
    trained = torch.ones(108, dtype=torch.bool)
    trained[:2] = False
    trained[50:54] = False
    with torch.no_grad():
        lp = model(tokens[:-1]).log_softmax(-1)[torch.arange(108), tokens[1:]]
    engine_lp = lp - 0.02
    engine_lp[51:101] -= 2.8  # this request was answered by the wrong adapter
    batch = dict(tokens=tokens, owner=owner, engine_lp=engine_lp, trained=trained, advantage=torch.tensor([1.0, -0.4, 0.0, 0.7, -1.3]))
    return SimpleNamespace(model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=2e-5), batch=batch, criterion=SequenceISLoss(5))


def run(s=None):
    s = s or build()
    b = s.batch
    tokens = b["tokens"]
    lp = s.model(tokens[:-1]).log_softmax(-1)[torch.arange(len(tokens) - 1), tokens[1:]]
    loss = s.criterion(lp, b["engine_lp"], owner=b["owner"], advantage=b["advantage"], trained=b["trained"])
    loss.backward()
    nn.utils.clip_grad_norm_(s.model.parameters(), max_norm=0.5)
    s.optimizer.step()
    return loss
