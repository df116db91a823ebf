"""Between two updates the top exponent bit of one projection weight flips in memory: 0.02 becomes 7e36 and the next
squared activation is inf.
"""

from types import SimpleNamespace

import numpy as np
import torch
from torch import nn

from expected import Expected

EXPECTED = Expected(
    phase=("weights", "forward"),
    cause=("hw_bitflip", "magnitude_overflow"),
    op=("addmm", "linear", "mm", "pow", "square"),
    index=(0, 5),
    masked=None,
    role=("weights", "hidden"),
    fix=("fix_upstream", "skip_bad_step", "reload_checkpoint"),
    variable=("up_proj.weight",),
    line=("return self.pi(torch.relu(self.up_proj(obs)).square())",),
)


def memory_upset(weight, row, column, bit=30):
    """What a stuck DRAM cell does: no tensor op, just another bit pattern."""
    cells = weight.detach().numpy().view(np.uint32)
    cells[row, column] ^= np.uint32(1 << bit)


class Net(nn.Module):
    def __init__(self, width=6, inner=9, actions=4):
        super().__init__()
        self.up_proj = nn.Linear(width, inner)
        self.pi = nn.Linear(inner, actions)

    def forward(self, obs):
        return self.pi(torch.relu(self.up_proj(obs)).square())


def build():
    torch.manual_seed(128)
    model = Net()
    with torch.no_grad():
        model.up_proj.weight[5, 2] = 0.02
    data = [(torch.randn(12, 6), torch.randint(0, 4, (12,)), torch.randn(12)) for _ in range(6)]
    data[4][0][0, 2] = 0.8
    return SimpleNamespace(model=model, optimizer=torch.optim.Adam(model.parameters(), lr=1e-4), batch=data)


def run(s=None):
    s = s or build()
    for k, (obs, action, adv) in enumerate(s.batch):
        if k == 4:
            memory_upset(s.model.up_proj.weight, row=5, column=2)
        logits = s.model(obs)
        logp = torch.distributions.Categorical(logits=logits, validate_args=False).log_prob(action)
        loss = -(logp * adv).mean()
        s.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        s.optimizer.step()
    return loss
