"""The online log-normaliser starts at -inf and the vocabulary padding is -inf too, but logaddexp absorbs both, forward and backward."""

from types import SimpleNamespace

import torch
import torch.nn as nn


def chunked_token_logps(hidden, weight, labels, real_vocab, chunk_size):
    running_lse = torch.full((hidden.shape[0],), float("-inf"))
    label_logits = torch.zeros(hidden.shape[0])
    columns = torch.arange(weight.shape[0])
    for start in range(0, weight.shape[0], chunk_size):
        stop = min(start + chunk_size, weight.shape[0])
        logits = hidden @ weight[start:stop].T
        logits = logits.masked_fill(columns[start:stop] >= real_vocab, float("-inf"))
        running_lse = torch.logaddexp(running_lse, torch.logsumexp(logits, dim=-1))
        here = (labels >= start) & (labels < stop)
        local = (labels - start).clamp(0, stop - start - 1)
        picked = hidden.mul(weight[start:stop][local]).sum(-1)
        label_logits = label_logits + torch.where(here, picked, 0.0)
    return label_logits - running_lse


class PolicyHead(nn.Module):
    def __init__(self, dim=10, padded_vocab=32):
        super().__init__()
        self.mixer = nn.Linear(dim, dim)
        self.lm_head = nn.Linear(dim, padded_vocab, bias=False)

    def forward(self, hidden):
        return torch.tanh(self.mixer(hidden))


def build():
    torch.manual_seed(118)
    model = PolicyHead()
    batch = {
        "hidden": torch.randn(12, 10),
        "labels": torch.randint(0, 29, (12,)),
        "old_logps": -3.4 + 0.05 * torch.randn(12),
        "advantages": torch.randn(12),
        "completion_mask": (torch.arange(12) % 6 != 5).float(),
    }
    return SimpleNamespace(model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-4), batch=batch)


def run(s=None):
    s = s or build()
    b = s.batch
    per_token_logps = chunked_token_logps(s.model(b["hidden"]), s.model.lm_head.weight, b["labels"], real_vocab=29, chunk_size=8)
    coef_1 = torch.exp(per_token_logps - b["old_logps"])
    coef_2 = coef_1.clamp(0.8, 1.28)
    per_token_loss = -torch.min(coef_1 * b["advantages"], coef_2 * b["advantages"])
    loss = (per_token_loss * b["completion_mask"]).sum() / b["completion_mask"].sum()
    s.optimizer.zero_grad()
    loss.backward()
    s.optimizer.step()
    return loss
