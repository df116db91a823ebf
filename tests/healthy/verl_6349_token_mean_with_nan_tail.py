"""verl #6349 - a NaN tail in the loss matrix under aggregation mode "token-mean".

The per-token losses of packed responses are scattered into a rectangle whose unused places are NaN. masked_sum picks the valid places
with torch.where before it adds up, so nothing leaks, and the scatter's backward only reads the places that were written.
Source: https://github.com/verl-project/verl/pull/6349 (the sequence-level modes multiplied by the mask; this one did not).
"""

from types import SimpleNamespace

import torch
import torch.nn as nn


class Actor(nn.Module):
    def __init__(self, vocab=20, dim=10):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.lm_head = nn.Linear(dim, vocab)

    def forward(self, ids):
        return self.lm_head(torch.tanh(self.embed(ids)))


def masked_sum(values, mask):
    valid = torch.where(mask.bool(), values, 0.0)
    return (valid * mask).sum()


def agg_loss(loss_mat, loss_mask):
    return masked_sum(loss_mat, loss_mask) / (loss_mask.sum() + 1e-8)


def unpack(flat, lengths):
    loss_mat = flat.new_full((len(lengths), max(lengths)), float("nan"))
    rows = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    cols = torch.cat([torch.arange(n) for n in lengths])
    return loss_mat.index_put((rows, cols), flat)


def build():
    torch.manual_seed(6349)
    actor = Actor()
    lengths = [6, 2, 0, 4]
    total = sum(lengths)
    mask = (torch.arange(max(lengths))[None] < torch.tensor(lengths)[:, None]).float()
    return SimpleNamespace(
        model=actor,
        optimizer=torch.optim.AdamW(actor.parameters(), lr=1e-4),
        tokens=torch.randint(0, 20, (total,)),
        targets=torch.randint(0, 20, (total,)),
        advantages=torch.randn(total),
        lengths=lengths,
        response_mask=mask,
    )


def run(s=None):
    s = s or build()
    log_prob = s.model(s.tokens).log_softmax(-1).gather(-1, s.targets.unsqueeze(-1)).squeeze(-1)
    ratio = (log_prob - log_prob.detach()).exp()
    flat = torch.max(-s.advantages * ratio, -s.advantages * ratio.clamp(0.8, 1.2))
    loss = agg_loss(unpack(flat, s.lengths), s.response_mask)
    s.optimizer.zero_grad()
    loss.backward()
    s.optimizer.step()
    return loss


if __name__ == "__main__":
    print(run())
