"""Fine-tuning an ALiBi model (Baichuan-13B style) on a left-padded batch: the first row of the mask has no key left.

The ALiBi mask holds slopes * distance and -inf above the diagonal; the padding mask takes away the left keys. The query at a left pad may look only at itself
and earlier pads, all forbidden: its row of scores is -inf everywhere and softmax gives NaN. The labels of pads are -100, so the first loss is a
good 3.2; the backward pass multiplies the zero gradient of these rows with NaN ("Function 'MmBackward0' returned nan values").
Source: https://github.com/hiyouga/FastEdit/issues/7 (loss 3.28, then nan; alibi and left padding)
Heals: a large finite fill, or a softmax that returns zeros for empty rows. Does not: nan_to_num behind the softmax, ignore_index, clipping.
"""

import math
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import nn

from expected import Expected

EXPECTED = Expected(
    phase=("backward",),
    cause=("fully_masked_softmax",),
    op=("softmax", "_softmax"),
    index=(1, 0, 0, 0),
    masked=True,
    role=("attention",),
    fix=("finite_mask_fill", "safe_softmax", "fix_upstream"),
    variable=("attn_weights",),
    line=("attn_weights = torch.softmax(attn_weights_raw, dim=-1)",),
)


def gen_alibi_mask(n_head, max_pos):
    slopes = torch.tensor([2.0 ** (-8.0 * (i + 1) / n_head) for i in range(n_head)])
    alibi = slopes[:, None, None] * torch.arange(max_pos)[None, None, :].float()
    future = torch.triu(torch.full((max_pos, max_pos), float("-inf")), 1)
    return future[None] + alibi


class Attention(nn.Module):
    def __init__(self, hidden=8, n_head=2, max_pos=16):
        super().__init__()
        self.W_pack = nn.Linear(hidden, 3 * hidden, bias=False)
        self.o_proj = nn.Linear(hidden, hidden, bias=False)
        self.n_head, self.head_dim = n_head, hidden // n_head
        self.register_buffer("future_mask", gen_alibi_mask(n_head, max_pos), persistent=False)

    def forward(self, x, attention_mask):
        b, t, _ = x.shape
        q, k, v = (y.view(b, t, self.n_head, self.head_dim).transpose(1, 2) for y in self.W_pack(x).chunk(3, dim=-1))
        attn_weights_raw = q @ k.transpose(2, 3) / math.sqrt(self.head_dim)
        attn_weights_raw = attn_weights_raw + self.future_mask[None, :, :t, :t]
        attn_weights_raw = attn_weights_raw.masked_fill(attention_mask[:, None, None, :] == 0, float("-inf"))
        attn_weights = torch.softmax(attn_weights_raw, dim=-1)
        out = (attn_weights @ v).transpose(1, 2).reshape(b, t, -1)
        return self.o_proj(out)


class Baichuan(nn.Module):
    def __init__(self, vocab=16, hidden=8):
        super().__init__()
        self.embed_tokens = nn.Embedding(vocab, hidden, padding_idx=0)
        self.self_attn = Attention(hidden)
        self.mlp = nn.Sequential(nn.Linear(hidden, 16), nn.SiLU(), nn.Linear(16, hidden))
        self.lm_head = nn.Linear(hidden, vocab, bias=False)

    def forward(self, ids, attention_mask):
        h = self.embed_tokens(ids)
        h = h + self.self_attn(h, attention_mask)
        return self.lm_head(h + self.mlp(h))


def build():
    torch.manual_seed(37)
    model = Baichuan()
    ids = torch.tensor([[3, 4, 5, 6, 7, 8], [0, 0, 9, 10, 11, 12]])
    attention_mask = (ids != 0).long()
    labels = ids.masked_fill(ids == 0, -100)
    labels[1, 2] = -100  # its predecessor is a pad
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    return SimpleNamespace(model=model, optimizer=optimizer, batch={"input_ids": ids, "attention_mask": attention_mask, "labels": labels})


def run(s=None):
    s = s or build()
    out = []
    for _ in range(2):
        b = s.batch
        logits = s.model(b["input_ids"], b["attention_mask"])
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), b["labels"][:, 1:].flatten(), ignore_index=-100)
        s.optimizer.zero_grad()
        loss.backward()
        s.optimizer.step()
        out.append(loss.item())
    return out


if __name__ == "__main__":
    print(run())
