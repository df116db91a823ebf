"""Log-probs are kept in float16, where exp leaves the range already at 11.1; a padded slot with log ratio 14 becomes
inf and then inf * 0."""

from types import SimpleNamespace

import torch
import torch.nn as nn

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("inf_times_zero_mask", "fp16_overflow", "exp_overflow"),
    op=("exp",),
    index=(0, 1, 3),
    masked=True,
    role=("ratio",),
    fix=("mask_before_op", "upcast_fp32"),
    variable=("r",),
    line=("r = (new - old).exp()",),
)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(14, 6)
        self.lin = nn.Linear(6, 14)

    def forward(self, ids):
        return self.lin(self.emb(ids))


class GroupLoss(nn.Module):
    def forward(self, *, new, old, adv, mask):
        r = (new - old).exp()
        lossy = -torch.minimum(r * adv, r.clamp(0.8, 1.25) * adv)
        lossy = lossy * mask
        return (lossy.sum(-1) / mask.sum(-1)).float().mean()


def build():
    torch.manual_seed(29)
    model = Net()
    ids = torch.randint(0, 14, (2, 3, 6))  # [G, B, T]
    mask = torch.ones(2, 3, 5, dtype=torch.float16)
    mask[0, 1, 3:] = 0
    mask[1, 2, 4] = 0
    with torch.no_grad():
        old = model(ids[..., :-1]).log_softmax(-1).gather(-1, ids[..., 1:, None]).squeeze(-1).half()
    old = torch.where(mask == 0, torch.full_like(old, -17.0), old)
    adv = torch.tensor([[0.5, -1.0, 0.25], [-0.5, 1.0, -0.25]], dtype=torch.float16).unsqueeze(-1)
    batch = dict(old=old, adv=adv, mask=mask)
    return SimpleNamespace(
        model=model, optimizer=torch.optim.Adam(model.parameters(), lr=1e-3), batch=batch, ids=ids, criterion=GroupLoss()
    )


def run(s=None):
    s = s or build()
    logits = s.model(s.ids[..., :-1])
    new = logits.log_softmax(-1).gather(-1, s.ids[..., 1:, None]).squeeze(-1).half()
    loss = s.criterion(new=new, **s.batch)
    s.optimizer.zero_grad()
    loss.backward()
    s.optimizer.step()
    return loss
