"""marin #9054 - AdamH (hyperball Adam) rescales every new matrix to the norm of the old one; a matrix of zeros becomes 0 / 0.

The Adam direction is scaled by learning rate * norm(p) / norm(u), added, and the result is brought back to norm(p). The norm of the update has a floor
of 1e-10, the norm of the new matrix has none. A gate projection that starts at zero stays there whatever its gradient is (the step is proportional to
its norm), so the new norm is 0 and new_p / 0 is NaN - even in the first warm-up step with a learning rate of 0. In the thread it poisoned a 67B
checkpoint, and the next forward pass reported the NaN loss.
Source: https://github.com/marin-community/marin/issues/9054 (scale_by_adamh).
Heals: a floor under the norm of the new matrix. Does not: a learning rate of 0, eps of Adam, the floor under the update's norm, clipping.
"""

from types import SimpleNamespace

import torch
from torch import nn
import torch.nn.functional as F

from expected import Expected

EXPECTED = Expected(
    phase=("optimizer",),
    cause=("zero_div_zero",),
    op=("div",),
    index=(0, 0),
    masked=None,
    role=("optimizer", "weights"),
    fix=("clamp_denominator", "where_on_detached", "avoid_singular_op", "validate_config"),
    variable=(None,),
    line=("p.copy_(new_p / new_p_norm * p_norm)",),
)


class AdamH(torch.optim.Optimizer):
    def __init__(self, params, lr=0.02, betas=(0.9, 0.999), eps=1e-8):
        super().__init__(params, dict(lr=lr, betas=betas, eps=eps))

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            b1, b2 = group["betas"]
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state.update(count=0, mu=torch.zeros_like(p), nu=torch.zeros_like(p))
                state["count"] += 1
                state["mu"].lerp_(p.grad, 1 - b1)
                state["nu"].lerp_(p.grad.square(), 1 - b2)
                mu_hat = state["mu"] / (1 - b1 ** state["count"])
                nu_hat = state["nu"] / (1 - b2 ** state["count"])
                u = mu_hat / (nu_hat.sqrt() + group["eps"])
                p_norm = torch.linalg.norm(p)
                new_p = p - group["lr"] * u * p_norm / torch.linalg.norm(u).clamp_min(1e-10)
                new_p_norm = torch.linalg.norm(new_p)
                p.copy_(new_p / new_p_norm * p_norm)


class GatedMLP(nn.Module):
    def __init__(self, vocab=30, dim=16):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.up = nn.Linear(dim, 32, bias=False)
        self.attn_gate = nn.Linear(dim, 32, bias=False)
        self.down = nn.Linear(32, vocab, bias=False)
        nn.init.zeros_(self.attn_gate.weight)

    def forward(self, ids):
        h = self.embed(ids)
        return self.down(F.silu(self.up(h)) * 2 * torch.sigmoid(self.attn_gate(h)))


def build():
    torch.manual_seed(4)
    model = GatedMLP()
    matrices = [model.up.weight, model.attn_gate.weight, model.down.weight]
    optimizer = AdamH(matrices, lr=0.02)
    adam = torch.optim.Adam([model.embed.weight], lr=1e-3)
    warmup = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(step / 2, 1.0))
    batch = dict(ids=torch.randint(0, 30, (4, 9)))
    return SimpleNamespace(model=model, optimizer=optimizer, adam=adam, warmup=warmup, batch=batch)


def run(s=None):
    s = s or build()
    losses = []
    for _ in range(2):
        s.model.zero_grad()
        ids = s.batch["ids"]
        loss = F.cross_entropy(s.model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(s.model.parameters(), 1.0)
        s.optimizer.step()
        s.adam.step()
        s.warmup.step()
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    print(run())
