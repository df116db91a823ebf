"""LLaMA-Factory neat packing (https://github.com/hiyouga/LLaMA-Factory/blob/main/src/llamafactory/data/collator.py, prepare_4d_attention_mask).

The block-diagonal mask of a packed batch is filled with the smallest number of the dtype where attention is not allowed. Rows of the padding
(segment 0) may attend to nothing at all: all their scores are that number, the softmax of such a row is uniform and not NaN, no other row reads
it and its labels are -100. Loss, gradients and weights are finite.
"""

from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F


def prepare_4d_attention_mask(attention_mask_with_indices, dtype):
    _, seq_len = attention_mask_with_indices.shape
    min_dtype = torch.finfo(dtype).min
    zero_tensor = torch.tensor(0, dtype=dtype)
    non_padding_mask = (attention_mask_with_indices != 0)[:, None, None, :]
    indices = attention_mask_with_indices[:, None, None, :]
    indices_t = attention_mask_with_indices[:, None, :, None]
    tril_mask = torch.tril(torch.ones((seq_len, seq_len), dtype=torch.bool))
    attention_mask_4d = (indices == indices_t) & non_padding_mask & tril_mask
    return torch.where(attention_mask_4d, zero_tensor, min_dtype)


class Attention(nn.Module):
    def __init__(self, hidden, heads=2):
        super().__init__()
        self.heads, self.head_dim = heads, hidden // heads
        self.qkv = nn.Linear(hidden, 3 * hidden, bias=False)
        self.o_proj = nn.Linear(hidden, hidden, bias=False)

    def forward(self, x, mask):
        B, T, C = x.shape
        q, k, v = self.qkv(x).view(B, T, 3, self.heads, self.head_dim).permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(-1, -2) / self.head_dim**0.5 + mask
        probs = F.softmax(scores, dim=-1, dtype=torch.float32).to(x.dtype)
        return self.o_proj((probs @ v).transpose(1, 2).reshape(B, T, C))


class Model(nn.Module):
    def __init__(self, vocab=24, hidden=16):
        super().__init__()
        self.embed_tokens = nn.Embedding(vocab, hidden)
        self.layers = nn.ModuleList(Attention(hidden) for _ in range(2))
        self.norm = nn.LayerNorm(hidden)
        self.lm_head = nn.Linear(hidden, vocab, bias=False)

    def forward(self, input_ids, attention_mask):
        hidden = self.embed_tokens(input_ids)
        for layer in self.layers:
            hidden = hidden + layer(self.norm(hidden), attention_mask)
        return self.lm_head(self.norm(hidden))


def build():
    torch.manual_seed(512)
    model = Model()
    segments = torch.tensor([[1, 1, 1, 1, 2, 2, 2, 3, 3, 0, 0, 0], [1, 1, 1, 1, 1, 1, 2, 2, 2, 2, 2, 0]])
    input_ids = torch.randint(1, 24, segments.shape) * (segments > 0)
    labels = input_ids.masked_fill(segments == 0, -100)
    labels[:, 1:][segments[:, 1:] != segments[:, :-1]] = -100
    return SimpleNamespace(
        model=model, input_ids=input_ids, segments=segments, labels=labels, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-4)
    )


def run(s=None):
    s = s or build()
    for _ in range(2):
        attention_mask = prepare_4d_attention_mask(s.segments, torch.float32)
        logits = s.model(s.input_ids, attention_mask)
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), s.labels[:, 1:].flatten(), ignore_index=-100)
        s.optimizer.zero_grad()
        loss.backward()
        s.optimizer.step()
    return loss


if __name__ == "__main__":
    run()
