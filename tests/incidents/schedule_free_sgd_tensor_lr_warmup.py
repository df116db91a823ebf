"""schedule_free, SGDScheduleFree.step - averaging weight / sum of weights while both are 0, with a tensor learning rate.

A reward model is trained with schedule-free SGD. The learning rate is a tensor (so that torch.compile does not build the step again for each
value) and an outer LambdaLR warms it up from 0. In the first step the averaging weight lr_max**2 and its running sum are both 0; the optimizer
catches ZeroDivisionError for this, but 0 / 0 of tensors raises nothing: it is NaN, and `lerp_` writes it into every weight. Loss and gradients of
that step are finite.

Source: https://github.com/facebookresearch/schedule_free/blob/main/schedulefree/sgd_schedulefree.py ; the float form of it is issue #5 there.

Heals: floor the sum, use 0 for the quotient while the sum is 0, or start the warm-up above 0. Does not heal: the except clause (it is here),
gradient clipping, a check of the gradients.
"""

from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F

from expected import Expected

EXPECTED = Expected(
    phase=("optimizer",),
    cause=("zero_div_zero",),
    op=("div",),
    index=(),
    masked=None,
    role=("optimizer",),
    fix=("clamp_denominator", "guard_empty", "validate_config"),
    variable=("ckp1",),
    line=("ckp1 = weight / weight_sum",),
)


class SGDScheduleFree(torch.optim.Optimizer):
    def __init__(self, params, lr, momentum=0.9, weight_decay=0.0, r=0.0, weight_lr_power=2):
        defaults = dict(
            lr=lr, momentum=momentum, weight_decay=weight_decay, r=r, weight_lr_power=weight_lr_power, k=0, lr_max=-1.0, weight_sum=0.0
        )
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            k, momentum = group["k"], group["momentum"]
            lr = group["lr"].clone()
            lr_max = group["lr_max"] = lr if k == 0 else torch.maximum(lr, group["lr_max"])

            weight = (k + 1) ** group["r"] * lr_max ** group["weight_lr_power"]
            weight_sum = group["weight_sum"] = group["weight_sum"] + weight
            try:
                ckp1 = weight / weight_sum
            except ZeroDivisionError:
                ckp1 = 0

            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if "z" not in state:
                    state["z"] = p.clone()
                grad, z = p.grad.add(p, alpha=group["weight_decay"]), state["z"]
                p.lerp_(end=z, weight=ckp1)
                p.add_(grad * (lr * (momentum * (1 - ckp1) - 1)))
                z.sub_(grad * lr)
            group["k"] = k + 1


class RewardModel(nn.Module):
    def __init__(self, vocab=23, dim=8):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.rnn = nn.GRU(dim, dim, batch_first=True)
        self.score = nn.Linear(dim, 1)

    def forward(self, ids):
        hidden, _ = self.rnn(self.embed(ids))
        return self.score(hidden[:, -1]).squeeze(-1)


def build():
    torch.manual_seed(2107)
    model = RewardModel()
    optimizer = SGDScheduleFree(model.parameters(), lr=torch.tensor(0.5), weight_decay=1e-3)
    warmup = 4
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, step / warmup))
    return SimpleNamespace(
        model=model,
        chosen=torch.randint(0, 23, (6, 7)),
        rejected=torch.randint(0, 23, (6, 7)),
        optimizer=optimizer,
        scheduler=scheduler,
    )


def run(s=None):
    s = s or build()
    for _ in range(2):
        s.optimizer.zero_grad(set_to_none=True)
        loss = -F.logsigmoid(s.model(s.chosen) - s.model(s.rejected)).mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(s.model.parameters(), 1.0)
        s.optimizer.step()
        s.scheduler.step()
    return loss


if __name__ == "__main__":
    print(run())
