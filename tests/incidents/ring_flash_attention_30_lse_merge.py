"""Ring attention (context parallel RL training): the running log-sum-exp is merged with log(1 + exp(block_lse - lse)), which overflows.

Every rank keeps its queries and sees the key/value blocks of the others one after the other. The partial results are merged by their log-sum-exp;
the first version of ring-flash-attention wrote new_lse = lse + log(1 + exp(block_lse - lse)). Block 1 holds a delimiter token with a massive
activation: for one head its scores lie some 100 above everything the query saw before, so the exponent passes 88.7, new_lse is inf, and when the
next block arrives exp(lse - new_lse) is exp(inf - inf) = NaN.
Source: https://github.com/zhuzilin/ring-flash-attention/pull/30 (found in https://github.com/jzhang38/EasyContext/issues/14).
Heals: new_lse = lse - logsigmoid(lse - block_lse), or torch.logaddexp.
Does not: clamping the difference (new_lse would be smaller than block_lse and exp(block_lse - new_lse) weighs the block by e^20), float32 (it is), an eps in the log.
"""

from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import nn

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("exp_overflow", "inf_minus_inf"),
    op=("exp",),
    index=(0, 0, 0),
    masked=False,
    role=("attention", "hidden"),
    fix=("stable_function",),
    variable=(None,),
    line=("new_lse = lse + torch.log(1 + torch.exp(block_lse - lse))",),
)

WORLD, LOCAL, HEADS, DIM = 4, 4, 2, 16
DELIM = 1


def block_attention(q, k, v, causal):
    scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
    if causal:
        future = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        scores = scores.masked_fill(future, float("-inf"))
    return scores.softmax(-1) @ v, scores.logsumexp(-1, keepdim=True)


def update_out_and_lse(out, lse, block_out, block_lse):
    if out is None:
        return block_out, block_lse
    new_lse = lse + torch.log(1 + torch.exp(block_lse - lse))
    out = torch.exp(lse - new_lse) * out + torch.exp(block_lse - new_lse) * block_out
    return out, new_lse


class RingAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(DIM, 3 * DIM, bias=False)
        self.o_proj = nn.Linear(DIM, DIM, bias=False)

    def forward(self, x, rank):
        q, k, v = self.qkv(x).chunk(3, -1)
        q, k, v = (t.view(-1, HEADS, DIM // HEADS).transpose(0, 1) for t in (q, k, v))
        blocks = list(zip(k.split(LOCAL, dim=1), v.split(LOCAL, dim=1)))
        q = q[:, rank * LOCAL : (rank + 1) * LOCAL]
        out = lse = None
        for step in range(rank + 1):  # own block first, then those that arrive over the ring
            key, value = blocks[rank - step]
            block_out, block_lse = block_attention(q, key, value, causal=step == 0)
            out, lse = update_out_and_lse(out, lse, block_out, block_lse)
        return self.o_proj(out.transpose(0, 1).reshape(LOCAL, DIM))


class ShardedPolicy(nn.Module):
    def __init__(self, vocab=20):
        super().__init__()
        self.embed_tokens = nn.Embedding(vocab, DIM)
        self.attn = RingAttention()
        self.lm_head = nn.Linear(DIM, vocab, bias=False)

    def forward(self, input_ids, rank):
        x = self.embed_tokens(input_ids)
        h = x[rank * LOCAL : (rank + 1) * LOCAL] + self.attn(x, rank)
        return self.lm_head(F.layer_norm(h, (DIM,)))


def build():
    torch.manual_seed(0)
    policy = ShardedPolicy()
    input_ids = torch.tensor([3, 7, 12, 5, 9, DELIM, 4, 6, 11, 8, 2, 15, 10, 13, 14, 16])
    rank = WORLD - 1
    with torch.no_grad():  # massive activation of the delimiter, as large models grow them
        x = policy.embed_tokens.weight
        q, k, _ = policy.attn.qkv(x).chunk(3, -1)
        d = DIM // HEADS
        score = (q[10, :d] * k[DELIM, :d]).sum() / d**0.5
        x[DELIM] *= 105.0 / score
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-4)
    batch = dict(
        input_ids=input_ids,
        rank=rank,
        labels=torch.tensor([13, 14, 16, 2]),
        loss_mask=torch.tensor([1.0, 1.0, 1.0, 0.0]),
        advantages=torch.tensor([0.8, 0.8, 0.8, 0.0]),
    )
    return SimpleNamespace(model=policy, optimizer=optimizer, batch=batch)


def run(s=None):
    s = s or build()
    b = s.batch
    logits = s.model(b["input_ids"], b["rank"])
    logprobs = logits.log_softmax(-1).gather(-1, b["labels"][:, None]).squeeze(-1)
    pg_loss = -(b["advantages"] * logprobs * b["loss_mask"]).sum() / b["loss_mask"].sum()
    s.optimizer.zero_grad()
    pg_loss.backward()
    s.optimizer.step()
    return pg_loss.item()


if __name__ == "__main__":
    print(run())
