"""ORPO in pure float16: the floor 1e-12 under 1 - p does not exist in half precision.

The odds ratio needs log(1 - p) of the length-averaged probability, written as log(max(-expm1(logp), 1e-12)).  The floor is made in the dtype of
logp, and float16 rounds 1e-12 to 0.  A chosen one-word answer ("Yes") that the model is sure of has logp 0 in half: -expm1(0) = 0, the maximum
of 0 and 0 is 0, log(0) = -inf.  The log-odds are +inf, logsigmoid hides it in the forward (its loss is 0), and the backward divides by 0.

Source: https://github.com/unslothai/unsloth-zoo/pull/830 (review of 2026-06-24: "the constant 1e-12 underflows to 0.0 in float16 ... This results
in mx.log(0.0) = -inf, causing NaN gradients and training crashes"); here in torch.
Heals: odds in float32, or a floor that float16 has (1e-4, 6e-8), logp clamped below 0.  Does not: a smaller floor, another beta, gradient clipping.
"""

from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import nn

from expected import Expected

EXPECTED = Expected(
    phase=("backward",),
    cause=("eps_underflow", "log_zero"),
    op=("log",),
    index=(1,),
    masked=None,
    role=("log_probs", "log_ratio", "hidden", "loss"),
    fix=("upcast_fp32", "representable_eps", "clamp_input", "where_on_detached"),
    variable=(None,),
    line=("log_odds = (logp_c - torch.log(val_c)) - (logp_r - torch.log(val_r))",),
)


class TinyLM(nn.Module):
    def __init__(self, vocab=32, dim=16):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.fc = nn.Linear(dim, dim)
        self.head = nn.Linear(dim, vocab, bias=False)

    def forward(self, ids):
        return self.head(torch.tanh(self.fc(self.embed(ids))))


def row_logps(model, ids, mask):
    logits = model(ids[:, :-1])
    logp_tok = torch.gather(logits.log_softmax(-1), 2, ids[:, 1:, None]).squeeze(2) * mask
    return logp_tok.sum(1) / mask.sum(1).clamp(min=1.0)


def orpo_loss(logp, beta):
    logp_c, logp_r = logp.chunk(2)
    sft = -logp_c.mean()
    val_c = torch.maximum(-torch.expm1(logp_c), torch.tensor(1e-12, dtype=logp_c.dtype))
    val_r = torch.maximum(-torch.expm1(logp_r), torch.tensor(1e-12, dtype=logp_r.dtype))
    log_odds = (logp_c - torch.log(val_c)) - (logp_r - torch.log(val_r))
    or_loss = -F.logsigmoid(log_odds).mean()
    return sft + beta * or_loss


def build():
    torch.manual_seed(83)
    model = TinyLM()
    ids = torch.randint(4, 32, (6, 6))
    ids[1] = torch.tensor([2, 3, 0, 0, 0, 0])  # "?" -> "Yes"
    mask = torch.ones(6, 5)
    mask[1, 1:] = 0
    mask[4, 3:] = 0
    with torch.no_grad():  # the pair that earlier epochs have learnt by heart
        h = torch.tanh(model.fc(model.embed.weight[2]))
        model.head.weight[3] = h * 22.0 / h.pow(2).sum()
    model = model.half()
    return SimpleNamespace(
        model=model, optimizer=torch.optim.SGD(model.parameters(), lr=1e-3), beta=0.1, batch={"ids": ids, "mask": mask.half()}
    )


def run(s=None):
    s = s or build()
    out = []
    for _ in range(2):
        logp = row_logps(s.model, s.batch["ids"], s.batch["mask"])
        loss = orpo_loss(logp, s.beta)
        s.optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(s.model.parameters(), 1.0)
        s.optimizer.step()
        out.append(loss.item())
    return out


if __name__ == "__main__":
    print(run())
