"""Tool output tokens have loss weight 0 and no engine log-prob (stored as -1000), so their ratio is infinite and the
weighting in place makes NaN."""

from types import SimpleNamespace

import torch
import torch.nn as nn

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("inf_times_zero_mask", "exp_overflow"),
    op=("exp",),
    index=(7,),
    masked=True,
    role=("is_weight", "ratio"),
    fix=("mask_before_op", "clamp_exponent"),
    variable=("tis",),
    line=("tis = (lp - engine_lp).float().exp()",),
)


class AgentLM(nn.Module):
    def __init__(self, vocab=26, dim=8):
        super().__init__()
        self.emb = nn.Embedding(vocab, dim)
        self.ff = nn.Linear(dim, dim)
        self.head = nn.Linear(dim, vocab)

    def forward(self, t):
        h = self.emb(t)
        return self.head(h + torch.nn.functional.gelu(self.ff(h)))


def turn_weights(turns, n):
    w = torch.zeros(n)
    for start, stop, who in turns:
        if who == "assistant":
            w[start:stop] = 1.0
    return w


def micro_batch_loss(lp, engine_lp, weight, advantage):
    with torch.no_grad():
        tis = (lp - engine_lp).float().exp()
    token = -(tis * advantage) * lp.float()
    token.mul_(weight)
    return token.sum() / weight.sum()


def build():
    torch.manual_seed(230)
    model = AgentLM().bfloat16()
    dialogs = []
    for turns in ([(0, 9, "assistant"), (9, 12, "user")], [(0, 7, "assistant"), (7, 11, "tool"), (11, 16, "assistant")]):
        n = turns[-1][1]
        toks = torch.randint(0, 26, (n + 1,))
        with torch.no_grad():
            lp = model(toks[:-1]).log_softmax(-1)[torch.arange(n), toks[1:]]
        engine = lp.float() + 0.01
        for start, stop, who in turns:
            if who == "tool":
                engine[start:stop] = -1000.0
        dialogs.append(dict(toks=toks, engine=engine, weight=turn_weights(turns, n)))
    return SimpleNamespace(
        model=model, optimizer=torch.optim.SGD(model.parameters(), lr=1e-2), batch=dict(dialogs=dialogs, advantage=[0.6, -0.6])
    )


def run(s=None):
    s = s or build()
    total = 0.0
    for d, adv in zip(s.batch["dialogs"], s.batch["advantage"]):
        n = len(d["engine"])
        lp = s.model(d["toks"][:-1]).log_softmax(-1)[torch.arange(n), d["toks"][1:]]
        loss = micro_batch_loss(lp, d["engine"], weight=d["weight"], advantage=adv) / 2
        loss.backward()
        total = total + loss
    s.optimizer.step()
    return total
