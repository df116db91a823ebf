"""The k3 KL estimator uses expm1(ref - policy); on one answered token the policy collapsed and the reference did not,
so expm1 leaves bf16."""

from types import SimpleNamespace

import torch
import torch.nn as nn

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("exp_overflow",),
    op=("expm1",),
    index=(1, 4),
    masked=False,
    role=("kl",),
    fix=("clamp_exponent",),
    variable=("k3",),
    line=("k3 = torch.expm1(gap)",),
)


class TiedLM(nn.Module):
    def __init__(self, vocab=21, dim=8):
        super().__init__()
        self.wte = nn.Embedding(vocab, dim)
        self.mix = nn.Linear(dim, dim)
        self.bias = nn.Parameter(torch.zeros(vocab))

    def forward(self, ids):
        return torch.tanh(self.mix(self.wte(ids))) @ self.wte.weight.T + self.bias


def token_logps(logits, labels):
    return torch.log_softmax(logits, dim=-1).gather(-1, labels.unsqueeze(-1)).squeeze(-1)


def grpo_step_loss(logps, ref_logps, adv, keep, beta):
    surrogate = torch.exp(logps - logps.detach()) * adv[:, None]
    gap = ref_logps - logps
    k3 = torch.expm1(gap)
    per_token = (k3 - gap).mul_(beta).sub_(surrogate)
    total = per_token.new_zeros(())
    for row, m in zip(per_token, keep):
        total = total + row[m].sum() / m.sum()
    return total / len(per_token)


def build():
    torch.manual_seed(77)
    model = TiedLM().to(torch.bfloat16)
    ids = torch.randint(1, 21, (3, 7))
    ids[:, 5] = torch.tensor([3, 0, 9])
    with torch.no_grad():
        model.bias[0] = -120.0  # the policy has unlearnt token 0
        ref_logps = token_logps(model(ids[:, :-1]), ids[:, 1:])
        ref_logps[1, 4] = -2.0  # the reference still likes it
    keep = torch.ones(3, 6, dtype=torch.bool)
    keep[:, 0] = False
    keep[0, 5] = False
    batch = {"ids": ids, "ref_logps": ref_logps, "keep": keep, "adv": torch.tensor([0.5, -1.0, 0.5], dtype=torch.bfloat16)}
    return SimpleNamespace(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=1e-3), batch=batch)


def run(s=None):
    s = s or build()
    ids = s.batch["ids"]
    logps = token_logps(s.model(ids[:, :-1]), ids[:, 1:])
    loss = grpo_step_loss(logps, s.batch["ref_logps"], s.batch["adv"], s.batch["keep"], beta=0.04)
    loss.backward()
    s.optimizer.step()
    return loss
