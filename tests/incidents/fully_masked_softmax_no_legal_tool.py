"""The tool-choice head masks illegal calls with -inf; in one state of the rollout no call is legal, so its log-softmax
is NaN and it counts.
"""

from types import SimpleNamespace

import torch
from torch import nn

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("fully_masked_softmax", "inf_minus_inf"),
    op=("_log_softmax", "log_softmax"),
    index=(9, 0),
    masked=False,
    role=("log_probs", "logits"),
    fix=("finite_mask_fill", "safe_softmax", "guard_empty", "drop_invalid_sample", "mask_before_op"),
    variable=("log_pi",),
    line=("log_pi = nn.functional.log_softmax(logits, dim=-1)",),
)


class ToolHead(nn.Module):
    def __init__(self, width=6, n_tools=5):
        super().__init__()
        self.score = nn.Linear(width, n_tools)

    def forward(self, state, legal):
        logits = self.score(state)
        logits = torch.where(legal, logits, torch.full_like(logits, -torch.inf))
        log_pi = nn.functional.log_softmax(logits, dim=-1)
        return log_pi


def ppo_clip(log_pi, old, adv, low=0.2, high=0.28):
    ratio = torch.exp(log_pi - old)
    return -torch.minimum(ratio * adv, ratio.clamp(1 - low, 1 + high) * adv)


def build():
    torch.manual_seed(109)
    torso = nn.GRU(4, 6, batch_first=True)
    head = ToolHead()
    legal = torch.rand(12, 5) > 0.3
    legal[:, 2] = True
    legal[9] = False  # the budget for every tool is used up
    action = torch.where(legal.any(-1), legal.float().argmax(-1), 0)
    batch = SimpleNamespace(obs=torch.randn(12, 3, 4), legal=legal, action=action, old=-torch.rand(12) - 0.5, adv=torch.randn(12))
    batch.live = torch.tensor([1, 1, 0, 1, 1, 1, 1, 0, 1, 1, 1, 0], dtype=torch.bool)
    model = nn.ModuleDict({"torso": torso, "head": head})
    return SimpleNamespace(model=model, optimizer=torch.optim.Adam(model.parameters(), lr=1e-3), batch=batch)


def run(s=None):
    s = s or build()
    b = s.batch
    _, last = s.model["torso"](b.obs)
    log_pi = s.model["head"](last[0], legal=b.legal)
    taken = log_pi[torch.arange(len(b.action)), b.action]
    per_state = ppo_clip(taken, b.old, b.adv)
    loss = per_state[b.live].mean()
    s.optimizer.zero_grad()
    loss.backward()
    s.optimizer.step()
    return loss
