"""Linear attention accumulates its key-value state along time in float16; late in a long sequence the running sum passes 65504."""

from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import nn

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("fp16_overflow",),
    op=("cumsum",),
    index=(0, 89, 4),
    masked=None,
    role=("hidden", "attention"),
    fix=("upcast_fp32", "clamp_input"),
    variable=("state",),
    line=("state = (phi * self.value(x)).cumsum(dim=1)",),
)


class CausalLinearMixer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.key = nn.Linear(width, width)
        self.value = nn.Linear(width, width)
        self.gate = nn.Linear(width, width)

    def forward(self, x):
        phi = F.elu(self.key(x)) + 1
        state = (phi * self.value(x)).cumsum(dim=1)
        weight = phi.cumsum(dim=1)
        return torch.sigmoid(self.gate(x)) * state / weight


class ValueModel(nn.Module):
    def __init__(self, vocab=12, width=6):
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.mixer = CausalLinearMixer(width)
        self.norm = nn.LayerNorm(width)
        self.v_head = nn.Linear(width, 1)

    def forward(self, ids):
        h = self.embed(ids)
        h = self.norm(h + self.mixer(h))
        return self.v_head(h).squeeze(-1)


def build():
    torch.manual_seed(113)
    model = ValueModel()
    with torch.no_grad():
        model.mixer.value.bias[4] = 240.0
        model.mixer.key.bias[4] = 2.0
    model = model.to(torch.float16)
    ids = torch.randint(0, 12, (2, 160))
    returns = torch.rand(2, 160)
    return SimpleNamespace(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=1e-2), batch={"ids": ids, "returns": returns})


def run(s=None):
    s = s or build()
    values = s.model(s.batch["ids"]).float()
    loss = F.smooth_l1_loss(values, s.batch["returns"])
    loss.backward()
    s.optimizer.step()
    return loss
