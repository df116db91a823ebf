"""Mistral-style fine-tune whose config says sliding_window: 0, read as a window of width 0 instead of no window.

The band mask keeps keys with 0 <= q - k < window.  With a window of 0 the lower bound lies above the causal upper bound and no key is
visible to any query, not even the token itself: every row of the scores is -inf and the softmax of the local layer is NaN.

Source: https://github.com/unslothai/unsloth/pull/8253
Heals: a non-positive window read as "no local attention" (validate the setting); a softmax that returns zeros for an empty row keeps it finite.
Does not: float32 attention, a smaller lr, dropping samples (all rows are empty).
"""

from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("fully_masked_softmax",),
    op=("softmax",),
    index=(0, 0, 0, 0),
    masked=None,
    role=("attention",),
    fix=("validate_config", "safe_softmax", "skip_disabled_term"),
    variable=("attn_weights",),
    line=("attn_weights = torch.softmax(scores.float(), dim=-1)",),
)


def sliding_window_causal_mask(q_len, window):
    row = torch.arange(q_len).unsqueeze(1)
    col = torch.arange(q_len).unsqueeze(0)
    mask = col <= row
    if window is not None:
        mask = mask & (row - col < window)
    return mask


class MistralAttention(nn.Module):
    def __init__(self, config, sliding_window):
        super().__init__()
        self.n_heads, self.head_dim = config.n_heads, config.hidden // config.n_heads
        self.sliding_window = sliding_window
        self.qkv_proj = nn.Linear(config.hidden, 3 * config.hidden, bias=False)
        self.o_proj = nn.Linear(config.hidden, config.hidden, bias=False)

    def forward(self, x):
        bsz, q_len, hidden = x.shape
        q, k, v = self.qkv_proj(x).view(bsz, q_len, 3, self.n_heads, self.head_dim).permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(-1, -2) * self.head_dim**-0.5
        mask = sliding_window_causal_mask(q_len, self.sliding_window)
        scores = scores.masked_fill(~mask, float("-inf"))
        attn_weights = torch.softmax(scores.float(), dim=-1)
        out = attn_weights.to(v.dtype) @ v
        return self.o_proj(out.transpose(1, 2).reshape(bsz, q_len, hidden))


class MistralForCausalLM(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab, config.hidden)
        windows = [None if kind == "full_attention" else config.sliding_window for kind in config.layer_types]
        self.layers = nn.ModuleList(MistralAttention(config, w) for w in windows)
        self.norms = nn.ModuleList(nn.RMSNorm(config.hidden) for _ in windows)
        self.lm_head = nn.Linear(config.hidden, config.vocab, bias=False)

    def forward(self, input_ids):
        x = self.embed_tokens(input_ids)
        for norm, layer in zip(self.norms, self.layers):
            x = x + layer(norm(x))
        return self.lm_head(x)


def build():
    torch.manual_seed(8253)
    config = SimpleNamespace(vocab=30, hidden=16, n_heads=2, sliding_window=0, layer_types=["full_attention", "sliding_attention"])
    model = MistralForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return SimpleNamespace(model=model, optimizer=optimizer, batch=torch.randint(0, 30, (2, 6)))


def run(s=None):
    s = s or build()
    for _ in range(2):
        s.optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = s.model(s.batch)
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), s.batch[:, 1:].flatten())
        loss.backward()
        s.optimizer.step()
    return loss


if __name__ == "__main__":
    print(run())
