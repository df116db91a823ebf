"""Long-context fine-tuning in fp16: the position counter of the rotary embedding is cast to the dtype of inv_freq.

model.half() casts the non-persistent buffer inv_freq too, and forward casts the positions to its type. Beyond 2048 the positions lose their last bits, which
nobody notices; from 65520 on they are inf. inf times a frequency is inf, cos(inf) is NaN, and the queries of these positions are NaN.
The script takes the last window of a 64k document (offset 65516), as context parallelism hands it to one rank.
Source: https://github.com/NVIDIA/Megatron-LM/issues/535 (seq.type_as(self.inv_freq)), https://github.com/tinygrad/tinygrad/pull/4587
Heals: positions and angles in fp32, cast cos and sin only. Does not: loss scaling, clamping scores, masking prompt tokens.
"""

from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import nn

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("fp16_overflow",),
    op=("type_as", "to", "_to_copy"),
    index=(4,),
    masked=False,
    role=("attention", "hidden"),
    fix=("upcast_fp32",),
    variable=("seq",),
    line=("seq = positions.type_as(self.inv_freq)",),
)


class RotaryEmbedding(nn.Module):
    def __init__(self, dim, base=10000):
        super().__init__()
        inv_freq = 1.0 / (base ** (torch.arange(0, dim, 2).float() / dim))
        self.register_buffer("inv_freq", inv_freq, persistent=False)

    def forward(self, max_seq_len, offset=0):
        positions = torch.arange(max_seq_len, device=self.inv_freq.device) + offset
        seq = positions.type_as(self.inv_freq)
        freqs = torch.einsum("i,j->ij", seq, self.inv_freq)
        return torch.cat((freqs, freqs), dim=-1)


def rotate_half(x):
    x1, x2 = x.chunk(2, dim=-1)
    return torch.cat((-x2, x1), dim=-1)


def apply_rotary_pos_emb(t, freqs):
    return t * freqs.cos().to(t.dtype) + rotate_half(t) * freqs.sin().to(t.dtype)


class Attention(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.rotary = RotaryEmbedding(dim)
        self.proj = nn.Linear(dim, dim, bias=False)

    def forward(self, x, offset):
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        emb = self.rotary(x.shape[1], offset)
        q, k = apply_rotary_pos_emb(q, emb), apply_rotary_pos_emb(k, emb)
        scores = (q @ k.transpose(-1, -2)) / q.shape[-1] ** 0.5
        causal = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
        attn = scores.float().masked_fill(~causal, float("-inf")).softmax(-1).to(v.dtype)
        return self.proj(attn @ v)


class GPT(nn.Module):
    def __init__(self, vocab=14, dim=8):
        super().__init__()
        self.wte = nn.Embedding(vocab, dim)
        self.attn = Attention(dim)
        self.lm_head = nn.Linear(dim, vocab, bias=False)

    def forward(self, ids, offset):
        x = self.wte(ids)
        return self.lm_head(x + self.attn(x, offset))


def build():
    torch.manual_seed(31)
    model = GPT().half()
    ids = torch.randint(0, 14, (2, 9))
    loss_mask = torch.ones(2, 8)
    loss_mask[:, :2] = 0.0
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    return SimpleNamespace(model=model, optimizer=optimizer, batch={"tokens": ids, "loss_mask": loss_mask, "offset": 65516})


def run(s=None):
    s = s or build()
    out = []
    for _ in range(2):
        b = s.batch
        logits = s.model(b["tokens"][:, :-1], b["offset"]).float()
        nll = F.cross_entropy(logits.flatten(0, 1), b["tokens"][:, 1:].flatten(), reduction="none").view_as(b["loss_mask"])
        loss = (nll * b["loss_mask"]).sum() / b["loss_mask"].sum()
        s.optimizer.zero_grad()
        loss.backward()
        s.optimizer.step()
        out.append(loss.item())
    return out


if __name__ == "__main__":
    print(run())
