"""Policy-gradient step on left-padded prompts through scaled_dot_product_attention with a causal + padding mask of -inf. Healthy.

Rows of padding positions are -inf everywhere: by hand softmax would be NaN there. The fused function answers a fully masked row with zeros (torch >= 2.5), and no
log-prob of a padding position enters the loss. Loss, gradients and weights are finite.

Source: https://github.com/allenai/OLMo/issues/322 (NaNs of scaled_dot_product_attention when the batch has padding), pytorch #103749.
"""

from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F

PAD = 0


class Block(nn.Module):
    def __init__(self, dim=16, heads=2):
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(dim)
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x, bias):
        b, t, d = x.shape
        q, k, v = self.qkv(self.norm(x)).view(b, t, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        att = F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
        return x + self.proj(att.transpose(1, 2).reshape(b, t, d))


class Policy(nn.Module):
    def __init__(self, vocab=26, dim=16):
        super().__init__()
        self.wte = nn.Embedding(vocab, dim)
        self.blocks = nn.ModuleList([Block(dim), Block(dim)])
        self.head = nn.Linear(dim, vocab, bias=False)

    def forward(self, ids, attention_mask):
        t = ids.shape[1]
        allowed = torch.ones(t, t, dtype=torch.bool).tril() & attention_mask[:, None, None, :].bool()
        bias = torch.zeros(allowed.shape).masked_fill(~allowed, float("-inf"))
        x = self.wte(ids)
        for block in self.blocks:
            x = block(x, bias)
        return self.head(x)


def build():
    torch.manual_seed(322)
    model = Policy()
    ids = torch.randint(1, 26, (3, 9))
    attention_mask = torch.ones(3, 9)
    for row, pad in enumerate((0, 3, 2)):
        ids[row, :pad] = PAD
        attention_mask[row, :pad] = 0
    completion_mask = torch.zeros(3, 8)
    completion_mask[:, 4:] = 1
    batch = dict(ids=ids, attention_mask=attention_mask, completion_mask=completion_mask, advantages=torch.tensor([0.7, -1.2, 0.5]))
    return SimpleNamespace(model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3), batch=batch)


def run(s=None):
    s = s or build()
    b = s.batch
    losses = []
    for _ in range(3):
        logits = s.model(b["ids"], b["attention_mask"])[:, :-1]
        logps = logits.log_softmax(-1).gather(-1, b["ids"][:, 1:].unsqueeze(-1)).squeeze(-1)
        loss = -(logps * b["advantages"][:, None] * b["completion_mask"]).sum() / b["completion_mask"].sum()
        s.optimizer.zero_grad()
        loss.backward()
        s.optimizer.step()
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    print(run())
