"""A GSPO-style sequence ratio sums 60 token log ratios of about 1.7 without dividing by the length, so exp sees roughly 100."""

from types import SimpleNamespace

import torch
import torch.nn as nn

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("seq_ratio_overflow", "exp_overflow"),
    op=("exp",),
    index=(2,),
    masked=False,
    role=("ratio", "is_weight"),
    fix=("clamp_exponent",),
    variable=("seq_weight",),
    line=("seq_weight = log_ratio.sum(dim=-1).exp()",),
)


class Bigram(nn.Module):
    def __init__(self, vocab=40, dim=10):
        super().__init__()
        self.emb = nn.Embedding(vocab, dim)
        self.head = nn.Linear(dim, vocab)

    def forward(self, x):
        return self.head(self.emb(x))


def selective_log_softmax(logits, index):
    picked = torch.gather(logits, dim=-1, index=index.unsqueeze(-1)).squeeze(-1)
    return picked - torch.logsumexp(logits, dim=-1)


def sequence_objective(logps, old_logps, mask, advantages, eps=3e-4):
    log_ratio = (logps - old_logps) * mask
    seq_weight = log_ratio.sum(dim=-1).exp()
    a = seq_weight * advantages
    b = seq_weight.clamp(1.0 - eps, 1.0 + eps) * advantages
    return -torch.minimum(a, b).mean()


def build():
    torch.manual_seed(4)
    model = Bigram()
    seq = torch.randint(0, 40, (4, 65))
    mask = torch.zeros(4, 64)
    for i, (start, stop) in enumerate([(3, 40), (2, 64), (4, 64), (5, 30)]):
        mask[i, start:stop] = 1.0
    with torch.no_grad():
        old_logps = selective_log_softmax(model(seq[:, :-1]), seq[:, 1:]) + 0.01 * torch.randn(4, 64)
        old_logps[2] -= 1.7  # sampled by a checkpoint from before the learning-rate spike
    batch = dict(seq=seq, mask=mask, old_logps=old_logps, advantages=torch.tensor([0.9, 0.2, -1.3, 0.2]))
    return SimpleNamespace(model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-5), batch=batch)


def run(s=None):
    s = s or build()
    b = s.batch
    logps = selective_log_softmax(s.model(b["seq"][:, :-1]), b["seq"][:, 1:])
    loss = sequence_objective(logps, b["old_logps"], b["mask"], advantages=b["advantages"])
    s.optimizer.zero_grad()
    loss.backward()
    s.optimizer.step()
    return loss
