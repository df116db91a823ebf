"""Sliding-window attention over a left-padded batch: a query deep inside the padding sees no key at all, so its softmax row is NaN."""

from types import SimpleNamespace

import torch
from torch import nn

from expected import Expected

EXPECTED = Expected(
    phase=("backward", "forward"),
    cause=("fully_masked_softmax", "where_grad_trap"),
    op=("_softmax", "softmax"),
    index=(1, 0, 0, 0),
    masked=True,
    role=("attention",),
    fix=("safe_softmax", "finite_mask_fill", "guard_empty"),
    variable=("probs",),
    line=("probs = scores.softmax(dim=-1)",),
)


class WindowAttention(nn.Module):
    def __init__(self, width, heads, window):
        super().__init__()
        self.heads, self.window = heads, window
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.o = nn.Linear(width, width, bias=False)

    def visible(self, attention_mask):
        pos = torch.arange(attention_mask.shape[1])
        age = pos[:, None] - pos[None, :]
        band = (age >= 0) & (age < self.window)
        return band[None, None] & attention_mask.bool()[:, None, None, :]

    def forward(self, x, attention_mask):
        bsz, length, width = x.shape
        q, k, v = (t.view(bsz, length, self.heads, -1).transpose(1, 2) for t in self.qkv(x).chunk(3, dim=-1))
        scores = torch.einsum("bhqd,bhkd->bhqk", q, k) * q.shape[-1] ** -0.5
        scores.masked_fill_(~self.visible(attention_mask), float("-inf"))
        probs = scores.softmax(dim=-1)
        ctx = torch.einsum("bhqk,bhkd->bhqd", probs, v.where(attention_mask[:, None, :, None].bool(), torch.zeros(())))
        return self.o(ctx.transpose(1, 2).reshape(bsz, length, width))


class Policy(nn.Module):
    def __init__(self, vocab=21, width=8):
        super().__init__()
        self.embed_tokens = nn.Embedding(vocab, width)
        self.attn = WindowAttention(width, heads=2, window=3)
        self.lm_head = nn.Linear(width, vocab, bias=False)

    def forward(self, ids, attention_mask):
        h = self.embed_tokens(ids)
        return self.lm_head(h + self.attn(h, attention_mask))


def build():
    torch.manual_seed(108)
    model = Policy()
    ids = torch.randint(1, 21, (3, 10))
    attention_mask = torch.ones(3, 10, dtype=torch.long)
    attention_mask[1, :4] = 0
    ids[1, :4] = 0
    adv = torch.tensor([-0.6, 1.1, 0.2])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    return SimpleNamespace(model=model, optimizer=optimizer, batch={"ids": ids, "attention_mask": attention_mask, "adv": adv})


def run(s=None):
    s = s or build()
    ids, attention_mask, adv = s.batch["ids"], s.batch["attention_mask"], s.batch["adv"]
    logits = s.model(ids, attention_mask)
    response = logits[:, 5:-1].log_softmax(-1)
    logp = response.gather(-1, ids[:, 6:].unsqueeze(-1)).squeeze(-1)
    pg = -(logp - logp.detach()).exp() * adv.unsqueeze(1)
    loss = pg.mean()
    loss.backward()
    s.optimizer.step()
    return loss
