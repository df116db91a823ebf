"""NovoGrad keeps one second moment per layer in float16; an unused head has gradient 0 and eps=1e-8 rounds to 0, so 0 is divided by 0.
https://github.com/google-deepmind/optax/issues/1789
"""

from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F

from expected import Expected

EXPECTED = Expected(
    phase=("optimizer",),
    cause=("eps_underflow", "zero_div_zero"),
    op=("div",),
    index=(0, 0),
    masked=None,
    role=("optimizer",),
    fix=("representable_eps", "upcast_fp32", "clamp_denominator"),
    variable=("direction",),
    line=('direction = p.grad / (state["nu"].sqrt() + group["eps"])',),
)


class NovoGrad(torch.optim.Optimizer):
    def __init__(self, params, lr=1e-3, betas=(0.9, 0.25), eps=1e-8, weight_decay=0.0):
        super().__init__(params, dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay))

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            b1, b2 = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                g2 = p.grad.square().sum()
                if "nu" not in state:
                    state["mu"] = torch.zeros_like(p)
                    state["nu"] = g2.clone()
                else:
                    state["nu"].mul_(b2).add_(g2, alpha=1 - b2)
                direction = p.grad / (state["nu"].sqrt() + group["eps"])
                direction.add_(p, alpha=group["weight_decay"])
                state["mu"].mul_(b1).add_(direction)
                p.sub_(group["lr"] * state["mu"])


class ActorCritic(nn.Module):
    def __init__(self, vocab=14, dim=6):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.lm_head = nn.Linear(dim, vocab, bias=False)
        self.v_head = nn.Linear(dim, 1, bias=False)

    def forward(self, ids):
        h = self.embed(ids)
        return self.lm_head(h), self.v_head(h).squeeze(-1)


def build():
    torch.manual_seed(1789)
    model = ActorCritic().half()
    ids = torch.randint(0, 14, (3, 6))
    return SimpleNamespace(model=model, optimizer=NovoGrad(model.parameters()), batch={"ids": ids, "vf_coef": 0.0})


def run(s=None):
    s = s or build()
    ids = s.batch["ids"]
    logits, values = s.model(ids[:, :-1])
    nll = F.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten())
    loss = nll + s.batch["vf_coef"] * values.float().square().mean()  # warm-up: the critic is switched off
    s.optimizer.zero_grad()
    loss.backward()
    s.optimizer.step()
    return loss
