"""Looks broken, is healthy: the log-sum-exp of a query row without keys is -inf, and the hand-written backward expects it.

Sliding-window attention as one autograd Function. The left-padded query rows see no key; their log-sum-exp is -inf on purpose (the convention of
flash-attention, so that partial results can be merged). Backward turns it into +inf before exp(scores - lse), and exp(-inf - inf) is exactly 0: no
probability, no gradient. Output rows of padding are 0 and the loss leaves them out.

Source: https://github.com/Dao-AILab/flash-attention/pull/978, https://github.com/Dao-AILab/flash-attention/pull/1936
"""

from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F


class WindowAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, visible):
        scale = q.shape[-1] ** -0.5
        scores = (q @ k.mT * scale).masked_fill(~visible, float("-inf"))
        lse = torch.logsumexp(scores, dim=-1, keepdim=True)
        p = torch.exp(scores - lse.masked_fill(lse == float("-inf"), float("inf")))
        o = p @ v
        ctx.scale = scale
        ctx.save_for_backward(q, k, v, o, lse, visible)
        return o

    @staticmethod
    def backward(ctx, do):
        q, k, v, o, lse, visible = ctx.saved_tensors
        scores = (q @ k.mT * ctx.scale).masked_fill(~visible, float("-inf"))
        p = torch.exp(scores - lse.masked_fill(lse == float("-inf"), float("inf")))
        dv = p.mT @ do
        delta = (do * o).sum(dim=-1, keepdim=True)
        ds = p * ctx.scale * (do @ v.mT - delta)
        return ds @ k, ds.mT @ q, dv, None


class Model(nn.Module):
    def __init__(self, vocab=15, dim=8, window=3):
        super().__init__()
        self.window = window
        self.embed = nn.Embedding(vocab, dim)
        self.to_qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.lm_head = nn.Linear(dim, vocab, bias=False)

    def forward(self, ids, attention_mask):
        n = ids.shape[1]
        x = self.embed(ids)
        q, k, v = self.to_qkv(x).chunk(3, dim=-1)
        window = torch.ones(n, n, dtype=torch.bool).tril().triu(1 - self.window)
        visible = window & attention_mask[:, None, :]
        return self.lm_head(x + WindowAttention.apply(q, k, v, visible))


def build():
    torch.manual_seed(2111)
    model = Model()
    ids = torch.randint(1, 15, (3, 7))
    attention_mask = torch.ones(3, 7, dtype=torch.bool)
    attention_mask[0, :3] = False
    attention_mask[2, :1] = False
    return SimpleNamespace(model=model, ids=ids, attention_mask=attention_mask, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3))


def run(s=None):
    s = s or build()
    s.optimizer.zero_grad(set_to_none=True)
    logits = s.model(s.ids, s.attention_mask)[:, :-1]
    labels = s.ids[:, 1:].masked_fill(~s.attention_mask[:, :-1], -100)
    loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)
    loss.backward()
    s.optimizer.step()
    return loss


if __name__ == "__main__":
    print(run())
