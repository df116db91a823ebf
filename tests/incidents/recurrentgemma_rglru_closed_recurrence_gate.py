"""recurrentgemma, RGLRU - sqrt(1 - a^2) at a = 1: the gate of one token is shut, the gradient of the root is infinite.

The recurrent unit keeps a = exp(-8 * softplus(a_param) * r) of its state and takes in sqrt(1 - a^2) of the new input. One token drives the gate r
of one channel to about 1e-9; in float32 a rounds to exactly 1 and 1 - a^2 to exactly 0. Forward is fine (nothing is taken in), the loss is finite,
but the derivative of the root at 0 is inf and the gradients of the gate, of a_param and of everything below are lost.

Source: https://github.com/google-deepmind/recurrentgemma/blob/main/recurrentgemma/torch/layers.py (class RGLRU; the authors bound the derivative
with SqrtBoundDerivative, ports that write torch.sqrt do not).

Heals: the bounded derivative, a floor under 1 - a^2, or sqrt(-expm1(2 log a)), which does not round to 0. Does not heal: `sqrt(x).clamp(min=1e-6)`
(clamp is after the root: 0 * inf), gradient clipping (divides by an infinite norm).
"""

from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F

from expected import Expected

EXPECTED = Expected(
    phase=("backward",),
    cause=("sqrt_zero_grad",),
    op=("sqrt",),
    index=(1, 4, 2),
    masked=False,
    role=("hidden",),
    fix=("clamp_input", "avoid_singular_op", "stable_function"),
    variable=("multiplier",),
    line=("multiplier = torch.sqrt(1 - a**2)",),
)


class RGLRU(nn.Module):
    def __init__(self, width=6):
        super().__init__()
        self.a_param = nn.Parameter(torch.empty(width).uniform_(-2.0, 0.0))
        self.input_gate = nn.Linear(width, width)
        self.a_gate = nn.Linear(width, width)

    def forward(self, x):
        gate_x = torch.sigmoid(self.input_gate(x))
        gate_a = torch.sigmoid(self.a_gate(x))
        log_a = -8.0 * gate_a * F.softplus(self.a_param)
        a = torch.exp(log_a)
        multiplier = torch.sqrt(1 - a**2)
        normalized_x = x * gate_x * multiplier
        h = torch.zeros_like(x[:, 0])
        states = []
        for t in range(x.shape[1]):
            h = a[:, t] * h + normalized_x[:, t]
            states.append(h)
        return torch.stack(states, dim=1)


class Griffin(nn.Module):
    def __init__(self, vocab=21, width=6):
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.norm = nn.LayerNorm(width)
        self.rglru = RGLRU(width)
        self.lm_head = nn.Linear(width, vocab, bias=False)

    def forward(self, ids):
        x = self.embed(ids)
        return self.lm_head(x + self.rglru(self.norm(x)))


SEPARATOR = 20


def build():
    torch.manual_seed(2108)
    model = Griffin()
    with torch.no_grad():  # trained: at a separator, channel 2 holds its state and takes in nothing
        model.embed.weight[:, 0].abs_()
        model.embed.weight[SEPARATOR] = torch.tensor([-4.0, 0.5, 0.3, 0.1, -0.2, 0.4])
        model.rglru.a_gate.weight[2] = 0.0
        model.rglru.a_gate.weight[2, 0] = 10.0
        model.rglru.a_gate.bias[2] = 0.0
    ids = torch.randint(0, 20, (3, 9))
    ids[1, 4] = SEPARATOR
    return SimpleNamespace(model=model, ids=ids, optimizer=torch.optim.AdamW(model.parameters(), lr=3e-4))


def run(s=None):
    s = s or build()
    s.optimizer.zero_grad(set_to_none=True)
    logits = s.model(s.ids[:, :-1])
    loss = F.cross_entropy(logits.flatten(0, 1), s.ids[:, 1:].flatten())
    loss.backward()
    torch.nn.utils.clip_grad_norm_(s.model.parameters(), 1.0)
    s.optimizer.step()
    return loss


if __name__ == "__main__":
    print(run())
