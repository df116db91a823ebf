"""A hand-written log-softmax subtracts the row maximum; for a prompt without any allowed candidate that is -inf minus -inf."""

from types import SimpleNamespace

import torch
import torch.nn as nn

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("inf_minus_inf", "fully_masked_softmax"),
    op=("sub",),
    index=(2, 0),
    masked=False,
    role=("logits", "log_probs"),
    fix=("finite_mask_fill", "drop_invalid_sample"),
    variable=("shifted",),
    line=("shifted = scores - top",),
)


class CandidateScorer(nn.Module):
    def __init__(self, dim=6):
        super().__init__()
        self.query = nn.Linear(dim, dim)
        self.key = nn.Linear(dim, dim)

    def forward(self, prompt, cands):
        return torch.einsum("bd,bnd->bn", self.query(prompt), self.key(cands))


def candidate_log_probs(scores, allowed):
    scores = scores + torch.zeros_like(scores).masked_fill(~allowed, -torch.inf)
    top = scores.amax(dim=-1, keepdim=True)
    shifted = scores - top
    return shifted - shifted.exp().sum(dim=-1, keepdim=True).log()


def build():
    torch.manual_seed(440)
    model = CandidateScorer()
    allowed = torch.ones(4, 5, dtype=torch.bool)
    allowed[0, 4] = False
    allowed[1, :2] = False
    allowed[2] = False  # every tool was filtered out for this prompt
    batch = dict(
        prompt=torch.randn(4, 6),
        cands=torch.randn(4, 5, 6),
        allowed=allowed,
        picked=torch.tensor([1, 3, 0, 2]),
        reward=torch.tensor([1.0, 0.0, 0.0, 1.0]),
    )
    return SimpleNamespace(model=model, optimizer=torch.optim.Adam(model.parameters(), lr=1e-3), batch=batch)


def run(s=None):
    s = s or build()
    b = s.batch
    scores = s.model(b["prompt"], b["cands"])
    lp = candidate_log_probs(scores, b["allowed"]).gather(1, b["picked"].unsqueeze(1)).squeeze(1)
    loss = -((b["reward"] - b["reward"].mean()) * lp).mean()
    s.optimizer.zero_grad()
    loss.backward()
    s.optimizer.step()
    return loss
