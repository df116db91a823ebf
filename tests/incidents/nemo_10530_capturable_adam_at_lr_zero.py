"""Graph-safe AdamW (the capturable formula) under a warmup schedule whose first learning rate is 0.

The capturable form keeps the learning rate on the device and folds it into the denominator: sqrt(v) / (bias * -step_size) + eps / -step_size.  The
linear warmup of the cosine schedule returns lr = 0 for step 0.  Wherever the gradient was not zero that gives -inf and an update of 0, as meant; in
the embedding rows that the batch never touched sqrt(v) is 0 too, and 0 / 0 writes NaN into the weights.

Source: https://github.com/NVIDIA-NeMo/Speech/pull/10530
Heals: a schedule that starts above 0 ((step + 1) / (warmup + 1)), a floor under the step size, or the plain form that multiplies by the step size.
Does not: a larger eps (eps / 0 is inf), gradient clipping, weight decay 0.
"""

from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F

from expected import Expected

EXPECTED = Expected(
    phase=("optimizer",),
    cause=("zero_div_zero", "zero_denominator"),
    op=("div",),
    index=(0, 0),
    masked=None,
    role=("optimizer",),
    fix=("validate_config", "clamp_denominator", "stable_function", "skip_disabled_term"),
    variable=("denom",),
    line=("denom = exp_avg_sq.sqrt() / (bias_correction2_sqrt * step_size_neg)",),
)

VOCAB, HIDDEN = 48, 16


class CapturableAdamW(torch.optim.Optimizer):
    """AdamW without host synchronisation: step count and learning rate stay tensors."""

    def __init__(self, params, lr=1e-4, betas=(0.9, 0.98), eps=1e-8, weight_decay=1e-3):
        super().__init__(params, dict(lr=torch.tensor(float(lr)), betas=betas, eps=eps, weight_decay=weight_decay))

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                if not state:
                    state["step"] = torch.zeros(())
                    state["exp_avg"] = torch.zeros_like(param)
                    state["exp_avg_sq"] = torch.zeros_like(param)
                exp_avg, exp_avg_sq = state["exp_avg"], state["exp_avg_sq"]
                state["step"] += 1
                param.mul_(1 - group["lr"] * group["weight_decay"])
                exp_avg.lerp_(param.grad, 1 - beta1)
                exp_avg_sq.mul_(beta2).addcmul_(param.grad, param.grad, value=1 - beta2)
                step_size_neg = -(group["lr"] / (1 - beta1 ** state["step"]))
                bias_correction2_sqrt = (1 - beta2 ** state["step"]).sqrt()
                denom = exp_avg_sq.sqrt() / (bias_correction2_sqrt * step_size_neg)
                denom.add_(group["eps"] / step_size_neg)
                param.addcdiv_(exp_avg, denom)


def warmup_lr(step, warmup_steps, max_lr):
    return max_lr * min(1.0, step / warmup_steps)


class TransducerLM(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, HIDDEN)
        self.rnn = nn.GRU(HIDDEN, HIDDEN, batch_first=True)
        self.head = nn.Linear(HIDDEN, VOCAB)

    def forward(self, tokens):
        return self.head(self.rnn(self.embed(tokens))[0])


def build():
    torch.manual_seed(10530)
    model = TransducerLM()
    optimizer = CapturableAdamW(model.parameters(), lr=1e-3)
    tokens = torch.randint(4, VOCAB, (2, 3, 7))
    return SimpleNamespace(model=model, optimizer=optimizer, batch=dict(tokens=tokens))


def run(s=None):
    s = s or build()
    for step in range(2):
        for group in s.optimizer.param_groups:
            group["lr"].fill_(warmup_lr(step, warmup_steps=10, max_lr=1e-3))
        s.optimizer.zero_grad()
        tokens = s.batch["tokens"][step]
        loss = F.cross_entropy(s.model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(s.model.parameters(), 1.0)
        s.optimizer.step()
    return loss


if __name__ == "__main__":
    print(run())
