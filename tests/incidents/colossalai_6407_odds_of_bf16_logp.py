"""The guard 1.0001 rounds to 1 in bfloat16, so the odds of a certain answer take log(0); logsigmoid hides it and backward makes 0/0.
https://github.com/hpcaitech/ColossalAI/pull/6407
"""

from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F

from expected import Expected

EXPECTED = Expected(
    phase=("backward", "forward"),
    cause=("eps_underflow", "log_zero", "where_grad_trap"),
    op=("log",),
    index=(2,),
    masked=False,
    role=("log_probs",),
    fix=("upcast_fp32", "representable_eps", "stable_function", "clamp_input"),
    variable=(None,),
    line=("chosen_odds = chosen_logp - torch.log(-torch.exp(chosen_logp) + 1.0001)",),
)


def calc_masked_log_probs(logits, sequences, mask):
    target = sequences[:, 1:]
    logits = logits[:, :-1]
    picked = logits.gather(-1, target.unsqueeze(-1)).squeeze(-1)
    log_norm = logits.exp().sum(-1).log()
    return (picked - log_norm) * mask


class OddsRatioLoss(nn.Module):
    def forward(self, chosen_logp, reject_logp, chosen_loss_mask, reject_loss_mask):
        chosen_logp = torch.sum(chosen_logp, dim=-1) / torch.sum(chosen_loss_mask, dim=-1)
        chosen_odds = chosen_logp - torch.log(-torch.exp(chosen_logp) + 1.0001)
        reject_logp = torch.sum(reject_logp, dim=-1) / torch.sum(reject_loss_mask, dim=-1)
        reject_odds = reject_logp - torch.log(-torch.exp(reject_logp) + 1.0001)
        log_odds_ratio = chosen_odds - reject_odds
        return F.logsigmoid(log_odds_ratio).mean()


class Actor(nn.Module):
    def __init__(self, vocab=10, dim=8):
        super().__init__()
        self.embed_tokens = nn.Embedding(vocab, dim)
        self.lm_head = nn.Linear(dim, vocab, bias=False)

    def forward(self, ids):
        return self.lm_head(self.embed_tokens(ids))


def build():
    torch.manual_seed(6407)
    actor = Actor()
    with torch.no_grad():
        actor.embed_tokens.weight[4] = torch.tensor([4.0, 0, 0, 0, 0, 0, 0, 0])
        actor.lm_head.weight[4] = torch.tensor([4.8, 0, 0, 0, 0, 0, 0, 0])
        actor.lm_head.weight[[0, 1, 2, 3, 5, 6, 7, 8, 9], 0] = -2.0
    actor = actor.to(torch.bfloat16)
    chosen, reject = torch.randint(0, 4, (4, 6)), torch.randint(0, 4, (4, 6))
    chosen[2] = 4  # the model is certain of this memorised answer
    chosen_mask, reject_mask = torch.ones(4, 5, dtype=torch.bfloat16), torch.ones(4, 5, dtype=torch.bfloat16)
    chosen_mask[:, :2] = 0
    reject_mask[:, :2] = 0
    batch = dict(chosen=chosen, reject=reject, chosen_loss_mask=chosen_mask, reject_loss_mask=reject_mask)
    optimizer = torch.optim.SGD(actor.parameters(), lr=1e-3)
    return SimpleNamespace(model=actor, optimizer=optimizer, batch=batch, odds_ratio_loss_fn=OddsRatioLoss())


def run(s=None):
    s = s or build()
    b = s.batch
    chosen_logp = calc_masked_log_probs(s.model(b["chosen"]), b["chosen"], b["chosen_loss_mask"])
    reject_logp = calc_masked_log_probs(s.model(b["reject"]), b["reject"], b["reject_loss_mask"])
    nll = -(chosen_logp.sum() / b["chosen_loss_mask"].sum())
    loss = nll - 0.1 * s.odds_ratio_loss_fn(chosen_logp, reject_logp, b["chosen_loss_mask"], b["reject_loss_mask"])
    s.optimizer.zero_grad()
    loss.backward()
    s.optimizer.step()
    return loss
