"""GRPO with vLLM importance sampling where the engine gave None for a token; healthy.

The None becomes NaN in the tensor, the difference at that place is NaN, and it is overwritten with 0 before the exponential
(everything without gradient): the ratio is exactly 1 there. Padding holds NaN as well and goes the same way.
Source: https://github.com/huggingface/trl/pull/6693
"""

from types import SimpleNamespace

import torch
from torch import nn


class Policy(nn.Module):
    def __init__(self, vocab=28, dim=12):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.head = nn.Linear(dim, vocab)

    def per_token_logps(self, ids):
        return self.head(self.embed(ids[:, :-1])).log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)


def pad_logprobs(rows, width):
    out = torch.full((len(rows), width), float("nan"))
    for i, row in enumerate(rows):
        out[i, : len(row)] = torch.tensor([float("nan") if v is None else v for v in row])
    return out


def build():
    torch.manual_seed(6)
    model = Policy()
    ids = torch.randint(0, 28, (3, 7))
    mask = torch.ones(3, 6)
    mask[2, 4:] = 0
    with torch.no_grad():
        old = model.per_token_logps(ids)
    rows = [(old[i] + 0.03).tolist()[: int(mask[i].sum())] for i in range(3)]
    rows[1][2] = None
    batch = dict(ids=ids, mask=mask, old=old, rows=rows, advantages=torch.tensor([1.0, -0.2, -0.8]))
    return SimpleNamespace(model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3), batch=batch)


def run(s=None, cap=2.0):
    s = s or build()
    b = s.batch
    sampling_per_token_logps = pad_logprobs(b["rows"], b["mask"].size(1))
    with torch.no_grad():
        logps_diff = b["old"] - sampling_per_token_logps
        logps_diff = logps_diff.masked_fill(logps_diff.isnan() | ~b["mask"].bool(), 0.0)
        importance_sampling_ratio = torch.exp(logps_diff).clamp(max=cap)
    for _ in range(3):
        per_token_logps = s.model.per_token_logps(b["ids"])
        coef_1 = torch.exp(per_token_logps - b["old"])
        coef_2 = coef_1.clamp(0.8, 1.2)
        adv = b["advantages"].unsqueeze(1)
        per_token_loss = -torch.min(coef_1 * adv, coef_2 * adv) * importance_sampling_ratio
        loss = (per_token_loss * b["mask"]).sum() / b["mask"].sum().clamp(min=1.0)
        s.optimizer.zero_grad()
        loss.backward()
        s.optimizer.step()
    return loss.item(), all(p.isfinite().all().item() for p in s.model.parameters())


if __name__ == "__main__":
    print(run())
