"""nn.MultiheadAttention with a causal mask and a key padding mask - queries of left padding see no key.

A prompt is padded on the left, as generation engines want it. The causal mask leaves a padding query only keys before it, and the key padding mask takes those: softmax over
-inf alone is NaN. The row is outside the loss mask, but the mask is multiplied on afterwards (NaN * 0) and all gradients are NaN as well.
Source: https://github.com/pytorch/pytorch/issues/41508 (need_weights=True). Heals: letting a padding query see itself (eye in the mask); a finite fill (-1e4) in a float mask;
need_weights=False (scaled_dot_product_attention makes rows of zeros). Does not: selecting the loss by where or indexing (backward of the softmax stays NaN); zeroing NaN after it.
"""

from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("fully_masked_softmax", "nan_times_zero_mask"),
    op=("softmax", "_softmax", "multi_head_attention_forward"),
    index=(2, 0, 0),
    masked=True,
    role=("attention",),
    fix=("finite_mask_fill", "safe_softmax", "mask_before_op", "guard_empty", "stable_function", "fix_upstream"),
    variable=(None,),
    line=("x, _ = self.attn(h, h, h, key_padding_mask=pad, attn_mask=causal, need_weights=True)",),
)


class Block(nn.Module):
    def __init__(self, d_model=16, nhead=2):
        super().__init__()
        self.ln = nn.LayerNorm(d_model)
        self.attn = nn.MultiheadAttention(d_model, nhead, batch_first=True)
        self.ff = nn.Sequential(nn.LayerNorm(d_model), nn.Linear(d_model, 32), nn.ReLU(), nn.Linear(32, d_model))

    def forward(self, src, pad, causal):
        h = self.ln(src)
        x, _ = self.attn(h, h, h, key_padding_mask=pad, attn_mask=causal, need_weights=True)
        src = src + x
        return src + self.ff(src)


class Policy(nn.Module):
    def __init__(self, vocab=40, d_model=16):
        super().__init__()
        self.embed = nn.Embedding(vocab, d_model)
        self.block = Block(d_model)
        self.head = nn.Linear(d_model, vocab)

    def forward(self, input_ids, attention_mask):
        length = input_ids.size(1)
        causal = torch.triu(torch.ones(length, length, dtype=torch.bool), diagonal=1)
        return self.head(self.block(self.embed(input_ids), ~attention_mask, causal))


def build():
    torch.manual_seed(0)
    model = Policy()
    input_ids = torch.randint(1, 40, (3, 8))
    attention_mask = torch.ones(3, 8, dtype=torch.bool)
    attention_mask[1, :3] = False
    attention_mask[2, :1] = False
    input_ids[~attention_mask] = 0
    response_mask = torch.zeros(3, 7)
    response_mask[:, 3:] = 1.0
    advantages = torch.tensor([[0.5], [1.2], [-0.9]])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    return SimpleNamespace(
        model=model,
        optimizer=optimizer,
        input_ids=input_ids,
        attention_mask=attention_mask,
        response_mask=response_mask,
        advantages=advantages,
    )


def run(s=None):
    s = s or build()
    logits = s.model(s.input_ids, s.attention_mask)[:, :-1]
    logp = torch.gather(F.log_softmax(logits, dim=-1), 2, s.input_ids[:, 1:, None]).squeeze(2)
    pg_losses = -s.advantages * logp
    loss = (pg_losses * s.response_mask).sum() / s.response_mask.sum()
    s.optimizer.zero_grad()
    loss.backward()
    s.optimizer.step()
    return loss


if __name__ == "__main__":
    print(run())
