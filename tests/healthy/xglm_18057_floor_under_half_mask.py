"""Healthy: left-padded batch in float16, scores plus a mask of finfo.min overflow to -inf, and a floor puts them back.

-65504 plus a score below -16 is -inf in half precision, and the padded query rows would be -inf throughout.  The maximum with finfo.min makes them
finite again before the softmax in float32: padded queries attend uniformly, which nobody reads, and the gradient of the maximum does not pass the floor.

Source: https://github.com/huggingface/transformers/pull/18057 (and pull/24561, the same line in Llama).  Healthy.
"""

from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F

VOCAB, HIDDEN, HEADS = 24, 16, 2


class XGLMAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(HIDDEN, 3 * HIDDEN)
        self.out_proj = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, hidden_states, attention_mask):
        bsz, tgt_len, _ = hidden_states.shape
        query, key, value = self.qkv(hidden_states).view(bsz, tgt_len, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        attn_weights = query @ key.transpose(-1, -2)
        attn_weights = attn_weights + attention_mask
        attn_weights = torch.max(attn_weights, torch.tensor(torch.finfo(attn_weights.dtype).min, dtype=attn_weights.dtype))
        attn_probs = F.softmax(attn_weights, dim=-1, dtype=torch.float32).to(value.dtype)
        return self.out_proj((attn_probs @ value).transpose(1, 2).reshape(bsz, tgt_len, HIDDEN))


class XGLM(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, HIDDEN)
        self.attn = XGLMAttention()
        self.lm_head = nn.Linear(HIDDEN, VOCAB, bias=False)

    def forward(self, input_ids, attention_mask):
        hidden = self.embed(input_ids)
        tgt_len = input_ids.size(1)
        allowed = attention_mask[:, None, None, :].bool() & torch.ones(tgt_len, tgt_len, dtype=torch.bool).tril()
        mask = torch.zeros(allowed.shape, dtype=hidden.dtype).masked_fill(~allowed, torch.finfo(hidden.dtype).min)
        return self.lm_head(hidden + self.attn(F.layer_norm(hidden, (HIDDEN,)), mask)).float()


def build():
    torch.manual_seed(18057)
    model = XGLM()
    with torch.no_grad():
        model.attn.qkv.weight[: 2 * HIDDEN] *= 12.0
    model = model.half()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    input_ids = torch.randint(2, VOCAB, (3, 8))
    attention_mask = torch.ones(3, 8, dtype=torch.long)
    attention_mask[0, :4] = 0
    attention_mask[1, :2] = 0
    input_ids = input_ids * attention_mask
    labels = input_ids.masked_fill(attention_mask.cumsum(1) <= 1, -100)
    return SimpleNamespace(model=model, optimizer=optimizer, batch=dict(input_ids=input_ids, attention_mask=attention_mask), labels=labels)


def run(s=None):
    s = s or build()
    for _ in range(3):
        s.optimizer.zero_grad()
        logits = s.model(**s.batch)
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), s.labels[:, 1:].flatten(), ignore_index=-100)
        loss.backward()
        s.optimizer.step()
    return loss


if __name__ == "__main__":
    print(run())
