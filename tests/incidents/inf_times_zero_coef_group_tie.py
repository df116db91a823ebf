"""All answers to one prompt got the same reward, so their centred advantages are 0; the uncapped importance weight of
one of them is infinite."""

from types import SimpleNamespace

import torch
import torch.nn as nn

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("inf_times_zero_coef", "exp_overflow"),
    op=("exp",),
    index=(1, 2, 3),
    masked=False,
    role=("is_weight", "ratio"),
    fix=("clamp_exponent",),
    variable=("behave_imp_weight",),
    line=("behave_imp_weight = (prox_lp - behave_lp).exp()",),
)


class Decoder(nn.Module):
    def __init__(self, vocab=14, dim=9):
        super().__init__()
        self.table = nn.Embedding(vocab, dim)
        self.lin = nn.Linear(dim, vocab)

    def forward(self, seq):
        return self.lin(torch.sin(self.table(seq)))


def advantages_of(rewards):
    return rewards - rewards.mean(dim=1, keepdim=True)


def decoupled_objective(lp, prox_lp, behave_lp, adv):
    ratio = torch.exp(lp - prox_lp)
    clipped = ratio.clamp(0.8, 1.2)
    objective = torch.minimum(ratio * adv, clipped * adv)
    behave_imp_weight = (prox_lp - behave_lp).exp()
    return -(objective * behave_imp_weight).mean(dim=(1, 2)).sum()


def build():
    torch.manual_seed(915)
    model = Decoder()
    seq = torch.randint(0, 14, (2, 3, 6))
    with torch.no_grad():
        prox_lp = model(seq[..., :-1]).log_softmax(-1).gather(-1, seq[..., 1:, None])[..., 0]
    behave_lp = prox_lp + 0.02 * torch.randn_like(prox_lp)
    behave_lp[1, 2, 3] = -97.5
    batch = dict(seq=seq, prox_lp=prox_lp, behave_lp=behave_lp, rewards=torch.tensor([[1.0, 0.0, 0.0], [1.0, 1.0, 1.0]]))
    return SimpleNamespace(model=model, optimizer=torch.optim.Adam(model.parameters(), lr=2e-4), batch=batch)


def run(s=None):
    s = s or build()
    b = s.batch
    lp = s.model(b["seq"][..., :-1]).log_softmax(-1).gather(-1, b["seq"][..., 1:, None])[..., 0]
    adv = advantages_of(b["rewards"]).unsqueeze(-1)
    loss = decoupled_objective(lp, b["prox_lp"], b["behave_lp"], adv)
    loss.backward()
    nn.utils.clip_grad_norm_(s.model.parameters(), 1.0)
    s.optimizer.step()
    return loss
