"""transformers GPT-2, eager attention of a reward model under fp16 autocast - a query/key pair leaves the range of half.

Two tokens of a response have grown large keys and queries; `_attn` multiplies them in half before it divides by sqrt(head_dim), the product is above 65504 and inf, the
softmax of that row is NaN. Source: https://github.com/huggingface/transformers/issues/24638 (an inf from the matmul of query and key in modeling_gpt2.py, NaN loss).
Heals: query.float(), key.float() before the matmul (reorder_and_upcast_attn); dividing the query by sqrt(head_dim) before the matmul; clamping attn_weights to finfo.max
(the issue's own question). Does not: dividing after; the causal mask (the pair is allowed to attend).
"""

import math
from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("fp16_overflow",),
    op=("matmul", "bmm", "@"),
    index=(1, 0, 4, 2),
    masked=False,
    role=("attention", "logits"),
    fix=("upcast_fp32", "avoid_singular_op", "clamp_input", "stable_function", "fix_upstream"),
    variable=("attn_weights",),
    line=("attn_weights = torch.matmul(query, key.transpose(-1, -2))",),
)


class GPT2Attention(nn.Module):
    def __init__(self, embed_dim, num_heads, max_positions=32):
        super().__init__()
        self.register_buffer(
            "bias",
            torch.tril(torch.ones((max_positions, max_positions), dtype=torch.bool)).view(1, 1, max_positions, max_positions),
            persistent=False,
        )
        self.embed_dim = embed_dim
        self.num_heads = num_heads
        self.head_dim = embed_dim // num_heads
        self.c_attn = nn.Linear(embed_dim, 3 * embed_dim)
        self.c_proj = nn.Linear(embed_dim, embed_dim)

    def _split_heads(self, tensor):
        return tensor.view(*tensor.shape[:-1], self.num_heads, self.head_dim).permute(0, 2, 1, 3)

    def _attn(self, query, key, value, attention_mask=None):
        attn_weights = torch.matmul(query, key.transpose(-1, -2))
        attn_weights = attn_weights / torch.full([], value.size(-1) ** 0.5, dtype=attn_weights.dtype)
        query_length, key_length = query.size(-2), key.size(-2)
        causal_mask = self.bias[:, :, key_length - query_length : key_length, :key_length]
        mask_value = torch.full([], torch.finfo(attn_weights.dtype).min, dtype=attn_weights.dtype)
        attn_weights = torch.where(causal_mask, attn_weights.to(attn_weights.dtype), mask_value)
        if attention_mask is not None:
            attn_weights = attn_weights + attention_mask
        attn_weights = nn.functional.softmax(attn_weights, dim=-1)
        attn_weights = attn_weights.type(value.dtype)
        return torch.matmul(attn_weights, value)

    def forward(self, hidden_states):
        query, key, value = self.c_attn(hidden_states).split(self.embed_dim, dim=2)
        query, key, value = self._split_heads(query), self._split_heads(key), self._split_heads(value)
        attn_output = self._attn(query, key, value)
        attn_output = attn_output.permute(0, 2, 1, 3).reshape(hidden_states.shape)
        return self.c_proj(attn_output)


class GPT2RewardModel(nn.Module):
    def __init__(self, vocab=40, n_embd=16, n_head=2):
        super().__init__()
        self.wte = nn.Embedding(vocab, n_embd)
        self.attn = GPT2Attention(n_embd, n_head)
        self.score = nn.Linear(n_embd, 1, bias=False)

    def forward(self, input_ids, last):
        hidden_states = self.wte(input_ids)
        hidden_states = hidden_states + self.attn(hidden_states)
        scores = self.score(hidden_states).squeeze(-1)
        return scores.gather(1, last.unsqueeze(1)).squeeze(1).float()


def build():
    torch.manual_seed(3)
    model = GPT2RewardModel()
    input_ids = torch.randint(2, 40, (4, 7))
    with torch.no_grad():
        model.wte.weight[:, :2] *= 0.1
        model.wte.weight[0, 0] = 40.0
        model.wte.weight[1, 1] = 44.0
        model.attn.c_attn.weight[0, 0] = 6.2
        model.attn.c_attn.weight[16, 1] = 6.5
    input_ids[1, 2], input_ids[1, 4] = 1, 0
    last = torch.tensor([6, 4, 6, 5])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    return SimpleNamespace(model=model, optimizer=optimizer, input_ids=input_ids, last=last)


def run(s=None):
    s = s or build()
    with torch.autocast("cpu", dtype=torch.float16):
        scores = s.model(s.input_ids, s.last)
    chosen, rejected = scores[:2], scores[2:]
    loss = -F.logsigmoid(chosen - rejected).mean()
    s.optimizer.zero_grad()
    loss.backward()
    s.optimizer.step()
    return loss


if __name__ == "__main__":
    print(run())
