"""A bf16 halting gate is clamped at 1 - 1e-6, which rounds back to 1, so a saturated gate still takes the log of 0."""

from types import SimpleNamespace

import torch
import torch.nn as nn

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("eps_underflow", "log_zero"),
    op=("log",),
    index=(2, 4),
    masked=False,
    role=("loss", "log_probs", "entropy"),
    fix=("upcast_fp32", "representable_eps", "stable_function", "clamp_input"),
    variable=("log_stay",),
    line=("log_stay = torch.log(1 - halt)",),
)


class HaltingHead(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.inner = nn.Linear(width, width)
        self.gate = nn.Linear(width, 1)

    def forward(self, h):
        return torch.sigmoid(self.gate(torch.tanh(self.inner(h)))).squeeze(-1)


class HaltingLoss(nn.Module):
    def __init__(self, margin=1e-6):
        super().__init__()
        self.margin = margin

    def forward(self, halt, chosen, credit):
        halt = halt.clamp(min=self.margin, max=1 - self.margin)
        log_halt = torch.log(halt)
        log_stay = torch.log(1 - halt)
        picked = chosen * log_halt + (1 - chosen) * log_stay
        return -(picked * credit[:, None]).mean()


def build():
    torch.manual_seed(323)
    head = HaltingHead()
    with torch.no_grad():
        head.gate.weight.mul_(4.0)
    head = head.to(torch.bfloat16)
    hidden = torch.randn(4, 6, 8)
    with torch.no_grad():
        direction = torch.linalg.solve(head.inner.weight.float(), torch.sign(head.gate.weight.float()).squeeze(0) * 5.0)
    hidden[2, 4] = direction
    chosen = (torch.rand(4, 6) < 0.5).to(torch.bfloat16)
    chosen[2, 4] = 0.0
    batch = {"hidden": hidden.to(torch.bfloat16), "chosen": chosen, "credit": torch.tensor([0.5, -1.0, 1.5, 0.25], dtype=torch.bfloat16)}
    return SimpleNamespace(model=head, optimizer=torch.optim.SGD(head.parameters(), lr=0.05), criterion=HaltingLoss(), batch=batch)


def run(s=None):
    s = s or build()
    halt = s.model(s.batch["hidden"])
    loss = s.criterion(halt, s.batch["chosen"], credit=s.batch["credit"])
    loss.backward()
    s.optimizer.step()
    return loss
