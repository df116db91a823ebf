"""Supervised fine-tune of a Qwen2-VL decoder layer, whole model in float16, eager attention.

One head drives query and key of a few tokens very high.  The eager path multiplies query by key in half precision and divides by
sqrt(head_dim) only afterwards: the raw dot product of an answer token with the image token passes 65504 and is inf before the division can help.
The softmax runs in float32, but inf - inf is NaN there.

Source: https://github.com/huggingface/transformers/pull/33312 (and https://github.com/huggingface/transformers/issues/35151)
Heals: float32 (or bfloat16) for the product, or the scale applied to the query before the product.
Does not: putting 0 where the score is inf (the released patch: the strongest score becomes a middling one), softmax in float32, a smaller lr.
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
    op=("matmul", "bmm"),
    index=(0, 1, 3, 2),
    masked=False,
    role=("attention", "logits"),
    fix=("upcast_fp32", "stable_function", "clamp_input"),
    variable=(None,),
    line=("attn_weights = torch.matmul(query_states, key_states.transpose(2, 3)) / math.sqrt(self.head_dim)",),
)

VOCAB, HIDDEN, HEADS = 24, 32, 2
IMAGE_PAD = 7


class Qwen2VLAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.head_dim = HIDDEN // HEADS
        self.q_proj = nn.Linear(HIDDEN, HIDDEN)
        self.k_proj = nn.Linear(HIDDEN, HIDDEN)
        self.v_proj = nn.Linear(HIDDEN, HIDDEN)
        self.o_proj = nn.Linear(HIDDEN, HIDDEN, bias=False)

    def forward(self, hidden_states, causal_mask):
        bsz, q_len, _ = hidden_states.shape
        query_states, key_states, value_states = (
            p(hidden_states).view(bsz, q_len, HEADS, self.head_dim).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj)
        )
        attn_weights = torch.matmul(query_states, key_states.transpose(2, 3)) / math.sqrt(self.head_dim)
        attn_weights = attn_weights + causal_mask
        attn_weights = F.softmax(attn_weights, dim=-1, dtype=torch.float32).to(query_states.dtype)
        attn_output = torch.matmul(attn_weights, value_states)
        return self.o_proj(attn_output.transpose(1, 2).reshape(bsz, q_len, HIDDEN))


class Qwen2VLForCausalLM(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed_tokens = nn.Embedding(VOCAB, HIDDEN)
        self.self_attn = Qwen2VLAttention()
        self.lm_head = nn.Linear(HIDDEN, VOCAB, bias=False)

    def forward(self, input_ids, labels):
        hidden = self.embed_tokens(input_ids)
        q_len = input_ids.size(1)
        causal_mask = torch.full((q_len, q_len), torch.finfo(hidden.dtype).min, dtype=hidden.dtype).triu(1)
        hidden = hidden + self.self_attn(F.layer_norm(hidden, (HIDDEN,)), causal_mask)
        logits = self.lm_head(hidden).float()
        return F.cross_entropy(logits[:, :-1].reshape(-1, VOCAB), labels[:, 1:].reshape(-1), ignore_index=-100)


def build():
    torch.manual_seed(33312)
    model = Qwen2VLForCausalLM()
    with torch.no_grad():
        # the second head looks from an answer token for the image token; both embeddings are dominated by one channel
        attn = model.self_attn
        for token, channel, proj in ((IMAGE_PAD, 5, attn.k_proj), (11, 6, attn.q_proj)):
            model.embed_tokens.weight[token] *= 0.02
            model.embed_tokens.weight[token, channel] = 4.0
            proj.weight[16:, channel] = 13.0
    model = model.half()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    input_ids = torch.tensor([[1, 2, IMAGE_PAD, 11, 12, 13], [1, 9, 10, 14, 15, 16]])
    labels = input_ids.clone()
    labels[0, :3] = -100
    labels[1, :2] = -100
    return SimpleNamespace(model=model, optimizer=optimizer, batch=dict(input_ids=input_ids, labels=labels))


def run(s=None):
    s = s or build()
    for _ in range(2):
        s.optimizer.zero_grad()
        loss = s.model(**s.batch)
        loss.backward()
        s.optimizer.step()
    return loss


if __name__ == "__main__":
    print(run())
