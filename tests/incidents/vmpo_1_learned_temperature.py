"""V-MPO weighs the better half of the samples by exp(A / eta); the learned temperature eta falls to its floor 1e-8 and exp overflows.
https://github.com/YYCAAA/V-MPO_Lunarlander/issues/1

The advantages never reach the divergence bound eps_eta, so the dual step only shrinks eta; the third update meets exp(1e8).
Heals: softmax and logsumexp in place of exp (or a bounded exponent). Does not: an epsilon in the sum of the weights, inf / inf stays.
"""

from types import SimpleNamespace

import torch
import torch.nn as nn

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("exp_overflow",),
    op=("exp",),
    index=(0,),
    masked=None,
    role=("is_weight", "advantages", "ratio"),
    fix=("stable_function", "clamp_exponent", "clamp_denominator"),
    variable=("weights",),
    line=("weights = torch.exp(top_advantages / self.eta.detach())",),
)


class SequenceActor(nn.Module):
    def __init__(self, vocab=23, width=12):
        super().__init__()
        self.emb = nn.Embedding(vocab, width)
        self.mix = nn.Linear(width, width)
        self.lm_head = nn.Linear(width, vocab)
        self.v_head = nn.Linear(width, 1)

    def forward(self, ids):
        h = torch.tanh(self.mix(self.emb(ids[:, :-1])))
        logits = self.lm_head(h).log_softmax(-1)
        return logits, logits.gather(-1, ids[:, 1:, None]).squeeze(-1), self.v_head(h.mean(1)).squeeze(-1)


class VMPO:
    def __init__(self, model, eps_eta=0.7, eps_alpha=0.01, lr=1e-3, dual_lr=0.6):
        self.model = model
        self.eta = nn.Parameter(torch.tensor(1.0))
        self.alpha = nn.Parameter(torch.tensor(0.1))
        self.eps_eta, self.eps_alpha = eps_eta, eps_alpha
        self.optimizer = torch.optim.Adam(
            [{"params": model.parameters(), "lr": lr}, {"params": [self.eta], "lr": dual_lr}, {"params": [self.alpha], "lr": 1e-3}]
        )

    def losses(self, ids, mask, returns, old_log_dist):
        log_dist, logp, values = self.model(ids)
        advantages = (returns - values).detach()
        top_advantages, top = advantages.topk(len(advantages) // 2)

        weights = torch.exp(top_advantages / self.eta.detach())
        psi = weights / weights.sum()
        seq_logp = (logp * mask).sum(-1) / mask.sum(-1)
        pi_loss = -(psi * seq_logp[top]).sum()
        eta_loss = self.eta * self.eps_eta + self.eta * torch.log(torch.mean(torch.exp(top_advantages / self.eta)))

        kl = (old_log_dist.exp() * (old_log_dist - log_dist)).sum(-1)
        kl = (kl * mask).sum(-1) / mask.sum(-1)
        alpha_loss = (self.alpha * (self.eps_alpha - kl.detach()) + self.alpha.detach() * kl).mean()
        value_loss = 0.5 * (returns - values).pow(2).mean()
        return pi_loss + eta_loss + alpha_loss + value_loss

    def project(self):
        with torch.no_grad():
            self.eta.clamp_(min=1e-8)
            self.alpha.clamp_(min=1e-8)


def build():
    torch.manual_seed(7)
    model = SequenceActor()
    ids = torch.randint(0, 23, (8, 9))
    mask = torch.ones(8, 8)
    mask[2, 5:] = 0
    mask[6, 3:] = 0
    batch = dict(ids=ids, mask=mask, returns=torch.tensor([0.2, 1.1, 0.9, -0.4, 0.0, 0.7, -0.2, 0.5]))
    agent = VMPO(model)
    return SimpleNamespace(model=model, agent=agent, optimizer=agent.optimizer, batch=batch)


def run(s=None):
    s = s or build()
    b = s.batch
    with torch.no_grad():
        old_log_dist = s.model(b["ids"])[0]
    for _ in range(4):
        loss = s.agent.losses(b["ids"], b["mask"], b["returns"], old_log_dist)
        s.optimizer.zero_grad()
        loss.backward()
        s.optimizer.step()
        s.agent.project()
    return loss
