"""Chain of torch.where: log(1 - p) is computed for every token, p is exactly 1 on one that another branch takes, and backward gives NaN."""

from types import SimpleNamespace

import torch
import torch.nn as nn

from expected import Expected

EXPECTED = Expected(
    phase=("backward",),
    cause=("where_grad_trap", "log_zero"),
    op=("log1p",),
    index=(2, 3),
    masked=True,
    role=("log_probs", "loss"),
    fix=("mask_before_op", "clamp_input", "stable_function", "where_on_detached"),
    variable=(None,),
    line=("push_down = -torch.log1p(-logp.exp())",),
)


class SignedTokenLoss(nn.Module):
    def __init__(self, floor=-6.0):
        super().__init__()
        self.floor = floor

    def forward(self, logits, target, adv, keep):
        logp = logits.log_softmax(-1).gather(-1, target.unsqueeze(-1)).squeeze(-1)
        push_up = -logp
        push_down = -torch.log1p(-logp.exp())
        per_token = torch.where(adv > 0, push_up, torch.where(logp < self.floor, torch.zeros_like(logp), push_down))
        per_token = torch.where(keep, per_token * adv.abs(), 0.0)
        return per_token.sum() / keep.sum()


class Policy(nn.Module):
    def __init__(self, vocab=9, width=6):
        super().__init__()
        self.emb = nn.Embedding(vocab, width)
        self.head = nn.Linear(width, vocab)

    def forward(self, ids):
        return self.head(self.emb(ids))


def build():
    torch.manual_seed(341)
    policy = Policy()
    prompt = torch.randint(0, 8, (4, 6))
    target = torch.randint(0, 8, (4, 6))
    prompt[2, 3], target[2, 3] = 8, 5
    with torch.no_grad():
        policy.head.weight[5] *= 3.0
        policy.emb.weight[8] = 60.0 * policy.head.weight[5] / policy.head.weight[5].norm()
    adv = torch.randn(4, 6)
    adv[2, 3] = 0.8
    keep = torch.ones(4, 6, dtype=torch.bool)
    keep[0, 4:] = False
    batch = {"prompt": prompt, "target": target, "adv": adv, "keep": keep}
    return SimpleNamespace(
        model=policy, optimizer=torch.optim.AdamW(policy.parameters(), lr=1e-3), criterion=SignedTokenLoss(), batch=batch
    )


def run(s=None):
    s = s or build()
    b = s.batch
    loss = s.criterion(s.model(b["prompt"]), b["target"], adv=b["adv"], keep=b["keep"])
    s.optimizer.zero_grad()
    loss.backward()
    s.optimizer.step()
    return loss
