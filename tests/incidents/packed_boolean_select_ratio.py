"""The ratio is taken on the whole packed stream and boolean indexing picks response tokens; the prompt overflow returns as 0 * inf."""

from types import SimpleNamespace

import torch
import torch.nn as nn

from expected import Expected

EXPECTED = Expected(
    phase=("backward",),
    cause=("where_grad_trap", "inf_times_zero_mask", "exp_overflow"),
    op=("exp",),
    index=(8,),
    masked=True,
    role=("ratio",),
    fix=("mask_before_op", "clamp_exponent"),
    variable=("weight",),
    line=("weight = torch.exp(logp - behaviour_logp)",),
)


class Policy(nn.Module):
    def __init__(self, vocab=16, width=8):
        super().__init__()
        self.emb = nn.Embedding(vocab, width)
        self.mix = nn.Linear(width, width)
        self.head = nn.Linear(width, vocab)

    def forward(self, ids):
        return self.head(torch.tanh(self.mix(self.emb(ids))))


def surrogate(logp, behaviour_logp, adv, is_response, low=0.2, high=0.28):
    weight = torch.exp(logp - behaviour_logp)
    weight, adv = weight[is_response], adv[is_response]
    gain = torch.minimum(weight * adv, weight.clamp(1 - low, 1 + high) * adv)
    return gain.mean().neg()


def build():
    torch.manual_seed(335)
    policy = Policy()
    ids = torch.randint(0, 16, (15,))
    is_response = torch.tensor([0, 0, 0, 1, 1, 1, 1, 0, 0, 0, 1, 1, 1, 1], dtype=torch.bool)
    with torch.no_grad():
        behaviour = policy(ids[:-1]).log_softmax(-1).gather(1, ids[1:, None]).squeeze(1) + 0.05 * torch.randn(14)
    behaviour[8] = -1.0e4  # prompt tokens carry the server's placeholder
    batch = {"ids": ids, "behaviour": behaviour, "adv": torch.randn(14), "is_response": is_response}
    return SimpleNamespace(model=policy, optimizer=torch.optim.AdamW(policy.parameters(), lr=1e-4), batch=batch)


def run(s=None):
    s = s or build()
    b = s.batch
    logp = s.model(b["ids"][:-1]).log_softmax(-1).gather(1, b["ids"][1:, None]).squeeze(1)
    loss = surrogate(logp, behaviour_logp=b["behaviour"], adv=b["adv"], is_response=b["is_response"])
    s.optimizer.zero_grad()
    loss.backward()
    s.optimizer.step()
    return loss
