"""finfo(float16).min plus a score below -16 rounds to -inf, so a left-padded query row becomes all -inf and its softmax NaN.
https://github.com/huggingface/transformers/pull/17306
"""

from types import SimpleNamespace

import torch
import torch.nn as nn

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("fully_masked_softmax", "fp16_overflow"),
    op=("_softmax", "add"),
    index=(1, 0, 0, 0),
    masked=True,
    role=("attention",),
    fix=("upcast_fp32", "safe_softmax", "finite_mask_fill"),
    variable=("attn_weights",),
    line=(
        "attn_weights = nn.functional.softmax(attn_weights, dim=-1)",
        "attn_weights = torch.matmul(q, k.transpose(-1, -2)) + attention_mask",
    ),
)


class OPTAttention(nn.Module):
    def __init__(self, embed_dim=8, num_heads=2):
        super().__init__()
        self.num_heads, self.head_dim = num_heads, embed_dim // num_heads
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(embed_dim, embed_dim) for _ in range(3))

    def _shape(self, x):
        return x.view(x.shape[0], x.shape[1], self.num_heads, self.head_dim).transpose(1, 2)

    def forward(self, hidden_states, attention_mask):
        q, k, v = (self._shape(p(hidden_states)) for p in (self.q_proj, self.k_proj, self.v_proj))
        attn_weights = torch.matmul(q, k.transpose(-1, -2)) + attention_mask
        attn_weights = nn.functional.softmax(attn_weights, dim=-1)
        return torch.matmul(attn_weights, v).transpose(1, 2).flatten(2)


class TinyOPT(nn.Module):
    def __init__(self, vocab=16, dim=8):
        super().__init__()
        self.embed_tokens = nn.Embedding(vocab, dim)
        self.self_attn = OPTAttention(dim)
        self.lm_head = nn.Linear(dim, vocab, bias=False)

    def _prepare_decoder_attention_mask(self, mask, dtype):
        t = mask.shape[1]
        allowed = torch.tril(torch.ones(t, t, dtype=torch.bool))[None, None] & mask[:, None, None, :].bool()
        return torch.zeros(allowed.shape, dtype=dtype).masked_fill(~allowed, torch.finfo(dtype).min)

    def forward(self, input_ids, attention_mask):
        hidden = self.embed_tokens(input_ids)
        hidden = hidden + self.self_attn(hidden, self._prepare_decoder_attention_mask(attention_mask, hidden.dtype))
        return self.lm_head(hidden)


def build():
    torch.manual_seed(17306)
    model = TinyOPT()
    with torch.no_grad():  # pretrained attention sinks: pad queries score every key strongly negative
        model.embed_tokens.weight[0] = 6.0
        model.self_attn.q_proj.weight.copy_(-torch.eye(8))
        model.self_attn.k_proj.weight.copy_(torch.eye(8))
        model.self_attn.k_proj.bias.fill_(5.0)
    model = model.half()
    input_ids = torch.randint(1, 16, (2, 6))
    input_ids[1, :2] = 0
    attention_mask = (input_ids != 0).long()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    return SimpleNamespace(model=model, optimizer=optimizer, batch={"input_ids": input_ids, "attention_mask": attention_mask})


def run(s=None):
    s = s or build()
    ids, mask = s.batch["input_ids"], s.batch["attention_mask"]
    logits = s.model(ids, mask)
    logps = logits[:, :-1].float().log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)
    completion = mask[:, :-1] * mask[:, 1:]
    loss = -(logps * completion).sum() / completion.sum()
    s.optimizer.zero_grad()
    loss.backward()
    s.optimizer.step()
    return loss
