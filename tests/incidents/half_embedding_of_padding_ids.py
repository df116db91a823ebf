"""An embedding kept in float16 with hundreds of padding ids that the loss does not leave out: each of their gradients is small, their sum
in the one row of the padding id is beyond 65504.

Heals: the table in float32, `padding_idx`, a smaller loss scale. Does not: clipping the gradient norm.
"""

from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F

from expected import Expected

EXPECTED = Expected(
    phase=("backward",),
    cause=("fp16_overflow",),
    op=("embedding",),
    index=None,
    masked=None,
    role=("hidden", "grad", "weights"),
    fix=("upcast_fp32", "validate_config"),
    variable=("hidden", None),
    line=("hidden = self.embed(ids)",),
)


class Tagger(nn.Module):
    def __init__(self, vocab=10, dim=4):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim, dtype=torch.float16)
        self.head = nn.Linear(dim, 1, bias=False)

    def forward(self, ids):
        hidden = self.embed(ids)
        return F.linear(hidden.float(), self.head.weight).squeeze(-1)


def build():
    torch.manual_seed(11)
    model = Tagger()
    with torch.no_grad():
        model.head.weight[:] = torch.tensor([[0.9, 0.4, -0.1, 0.05]])
    ids = torch.zeros(4, 128, dtype=torch.long)
    ids[:, :6] = torch.randint(1, 10, (4, 6))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    return SimpleNamespace(model=model, optimizer=optimizer, x=ids, target=torch.full((4, 128), 3.0), loss_scale=2.0**14)


def run(s=None):
    s = s or build()
    logits = s.model(s.x)
    loss = F.mse_loss(logits.float(), s.target)
    s.optimizer.zero_grad()
    (loss * s.loss_scale).backward()
    for p in s.model.parameters():
        if p.grad is not None:
            p.grad.div_(s.loss_scale)
    s.optimizer.step()
    return loss


if __name__ == "__main__":
    run()
