"""Healthy. Zigzag ring attention: blocks that lie wholly in the future of a query have a log-sum-exp of -inf, and are merged all the same.

Every query chunk is merged with every key block, also those it may not see at all: their scores are all -inf, lse is -inf, the row maximum is replaced
by 0 so that exp gives 0 and the output 0. update_out_and_lse forms block_lse - lse = -inf, whose sigmoid is 0, and lse - block_lse = +inf, whose logsigmoid
is 0: such a block changes nothing. The first block is the own one, so lse is finite from the start. The backward is written by hand and recomputes
exp(scores - lse) = exp(-inf) = 0 from the final lse.
Source: https://github.com/zhuzilin/ring-flash-attention/pull/34 (update with sigmoid and logsigmoid).
"""

from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import nn


CHUNK, CHUNKS = 4, 4


def block_scores(q, k, q_chunk, k_chunk, scale):
    q_pos = q_chunk * CHUNK + torch.arange(CHUNK)
    k_pos = k_chunk * CHUNK + torch.arange(CHUNK)
    return ((q @ k.transpose(-1, -2)) * scale).masked_fill(k_pos[None] > q_pos[:, None], float("-inf"))


def block_forward(q, k, v, q_chunk, k_chunk, scale):
    scores = block_scores(q, k, q_chunk, k_chunk, scale)
    row_max = scores.amax(-1, keepdim=True)
    row_max = torch.where(torch.isneginf(row_max), 0.0, row_max)
    p = torch.exp(scores - row_max)
    denom = p.sum(-1, keepdim=True)
    block_lse = row_max + torch.log(denom)  # log(0) = -inf for a block of the future
    return (p @ v) / denom.clamp_min(1e-20), block_lse


def update_out_and_lse(out, lse, block_out, block_lse):
    out = out - torch.sigmoid(block_lse - lse) * (out - block_out)
    lse = lse - F.logsigmoid(lse - block_lse)
    return out, lse


class ZigzagRingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, scale):
        qs, ks, vs = (t.split(CHUNK, dim=1) for t in (q, k, v))
        outs, lses = [], []
        for i in range(CHUNKS):
            out, lse = block_forward(qs[i], ks[i], vs[i], i, i, scale)
            for step in range(1, CHUNKS):
                j = (i - step) % CHUNKS
                out, lse = update_out_and_lse(out, lse, *block_forward(qs[i], ks[j], vs[j], i, j, scale))
            outs.append(out)
            lses.append(lse)
        out = torch.cat(outs, 1)
        ctx.save_for_backward(q, k, v, out, torch.cat(lses, 1))
        ctx.scale = scale
        return out

    @staticmethod
    def backward(ctx, dout):
        q, k, v, out, lse = ctx.saved_tensors
        dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
        delta = (dout * out).sum(-1, keepdim=True)
        rows = [slice(i * CHUNK, (i + 1) * CHUNK) for i in range(CHUNKS)]
        for i, r in enumerate(rows):
            for j, c in enumerate(rows):
                p = torch.exp(block_scores(q[:, r], k[:, c], i, j, ctx.scale) - lse[:, r])
                ds = p * (dout[:, r] @ v[:, c].transpose(-1, -2) - delta[:, r]) * ctx.scale
                dv[:, c] += p.transpose(-1, -2) @ dout[:, r]
                dq[:, r] += ds @ k[:, c]
                dk[:, c] += ds.transpose(-1, -2) @ q[:, r]
        return dq, dk, dv, None


class Policy(nn.Module):
    def __init__(self, vocab=24, dim=16, heads=2):
        super().__init__()
        self.heads = heads
        self.embed_tokens = nn.Embedding(vocab, dim)
        self.qkv = nn.Linear(dim, 3 * dim)
        self.lm_head = nn.Linear(dim, vocab)

    def forward(self, ids):
        x = self.embed_tokens(ids)
        n, dim = x.shape
        q, k, v = (t.view(n, self.heads, -1).transpose(0, 1) for t in self.qkv(x).chunk(3, -1))
        y = ZigzagRingAttention.apply(q, k, v, (dim // self.heads) ** -0.5)
        return self.lm_head(x + y.transpose(0, 1).reshape(n, dim))


def build():
    torch.manual_seed(8)
    policy = Policy()
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-3)
    ids = torch.randint(0, 24, (CHUNK * CHUNKS + 1,))
    mask = (torch.arange(CHUNK * CHUNKS) >= 5).float()
    return SimpleNamespace(model=policy, optimizer=optimizer, batch=dict(ids=ids, mask=mask, advantages=torch.full((CHUNK * CHUNKS,), 0.6)))


def run(s=None):
    s = s or build()
    b = s.batch
    losses = []
    for _ in range(3):
        logits = s.model(b["ids"][:-1])
        logprobs = logits.log_softmax(-1).gather(-1, b["ids"][1:, None]).squeeze(-1)
        loss = -(b["advantages"] * logprobs * b["mask"]).sum() / b["mask"].sum()
        s.optimizer.zero_grad()
        loss.backward()
        s.optimizer.step()
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    print(run())
