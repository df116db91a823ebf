"""One micro-batch of the accumulation holds only user tokens, so its token-averaged loss is 0/0 and poisons the summed gradient.
https://github.com/karpathy/nanochat/issues/618
"""

from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("empty_mask_mean", "zero_div_zero"),
    op=("div",),
    index=(),
    masked=None,
    role=("loss",),
    fix=("clamp_denominator", "guard_empty"),
    variable=("loss",),
    line=("loss = per_token.sum() / supervised.sum()",),
)


class GPT(nn.Module):
    def __init__(self, vocab=22, n_embd=8):
        super().__init__()
        self.wte = nn.Embedding(vocab, n_embd)
        self.c_fc = nn.Linear(n_embd, 2 * n_embd)
        self.c_proj = nn.Linear(2 * n_embd, n_embd)
        self.lm_head = nn.Linear(n_embd, vocab, bias=False)

    def forward(self, idx, targets=None, loss_reduction="mean"):
        x = self.wte(idx)
        x = x + self.c_proj(F.relu(self.c_fc(x)).square())
        logits = 15 * torch.tanh(self.lm_head(x) / 15)
        if targets is None:
            return logits
        flat = targets.view(-1)
        supervised = (flat >= 0).to(logits.dtype)
        per_token = F.cross_entropy(logits.view(-1, logits.size(-1)), flat.clamp(min=0), reduction="none") * supervised
        if loss_reduction == "none":
            return per_token
        loss = per_token.sum() / supervised.sum()
        return loss


def build():
    torch.manual_seed(618)
    model = GPT()
    micro_batches = []
    for _ in range(4):
        x = torch.randint(0, 22, (2, 6))
        y = x.roll(-1, 1)
        y[:, :2] = -1
        micro_batches.append((x, y))
    micro_batches[2][1].fill_(-1)  # a long user turn fills both rows
    return SimpleNamespace(model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3), batch=micro_batches)


def run(s=None):
    s = s or build()
    grad_accum_steps = len(s.batch)
    total = torch.zeros(())
    for x, y in s.batch:
        loss = s.model(x, y)
        total += loss.detach() / grad_accum_steps
        (loss / grad_accum_steps).backward()
    s.optimizer.step()
    return total
