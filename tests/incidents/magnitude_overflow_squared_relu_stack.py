"""Two squared-ReLU layers in float32: an outlier channel of 5e9 is squared twice, the second square is inf and tanh
hides it from the loss.
"""

from types import SimpleNamespace

import torch
from torch import nn

from expected import Expected

EXPECTED = Expected(
    phase=("backward", "forward"),
    cause=("magnitude_overflow",),
    op=("pow", "mul", "square"),
    index=(1, 2, 6),
    masked=None,
    role=("hidden",),
    fix=("clamp_input", "avoid_singular_op", "stable_function", "fix_upstream"),
    variable=("act",),
    line=("act = torch.relu(pre) ** 2",),
)


def squared_relu(pre):
    act = torch.relu(pre) ** 2
    return act


class Ffn(nn.Module):
    def __init__(self, width, inner):
        super().__init__()
        self.w_in = nn.Linear(width, inner)
        self.w_out = nn.Linear(inner, width)

    def forward(self, x):
        return x + self.w_out(squared_relu(self.w_in(x)))


class Stack(nn.Module):
    def __init__(self, vocab=16, width=5, inner=9):
        super().__init__()
        self.tok = nn.Embedding(vocab, width)
        self.layers = nn.ModuleList(Ffn(width, inner) for _ in range(2))
        self.readout = nn.Linear(width, vocab, bias=False)

    def forward(self, ids):
        x = self.tok(ids)
        for layer in self.layers:
            x = layer(x)
        return self.readout(torch.tanh(x))


def build():
    torch.manual_seed(118)
    model = Stack()
    ids = torch.randint(0, 15, (3, 7))
    ids[1, 2] = ids[2, 4] = 15
    with torch.no_grad():
        model.tok.weight[:15, 3] = 0.0
        model.tok.weight[15, 3] = 7.0e4  # left behind by an unclipped step
        model.layers[0].w_in.weight[1, 3] = 7.0e4
        model.layers[0].w_out.weight[2, 1] = 3.0
        model.layers[1].w_in.weight[:, 2] = -model.layers[1].w_in.weight[:, 2].abs() - 0.1
        model.layers[1].w_in.weight[6, 2] = 2.0
    adv = torch.tensor([0.5, 1.0, -1.5])
    return SimpleNamespace(model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-4), batch=(ids, adv))


def run(s=None):
    s = s or build()
    ids, adv = s.batch
    logp = s.model(ids[:, :-1]).log_softmax(-1).gather(2, ids[:, 1:].unsqueeze(2)).squeeze(2)
    loss = -(adv[:, None] * logp).sum() / logp.numel()
    loss.backward()
    s.optimizer.step()
    return loss
