"""Idefics gated cross attention - text that stands before the first image may attend to no image at all, and here its bias row is all -inf.

The softmax of such a row is NaN. After the output projection the gate sets the positions without an image to 0, so hidden states and loss are
finite; in the backward pass the zero gradient of these positions meets their NaN (0 * NaN) and the projections' gradients are NaN.
Source: https://github.com/huggingface/transformers/blob/main/src/transformers/models/idefics/modeling_idefics.py (IdeficsGatedCrossAttentionLayer,
whose image_attention_mask is filled with finfo.min)
Heals: a finite fill, or opening the rows without an image before the softmax. Does not: nan_to_num on the attention output, the gate that is there.
"""

from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F

from expected import Expected

EXPECTED = Expected(
    phase=("backward", "forward"),
    cause=("fully_masked_softmax", "where_grad_trap", "inf_minus_inf"),
    op=("softmax", "_softmax"),
    index=(1, 0, 0, 0),
    masked=True,
    role=("attention",),
    fix=("finite_mask_fill", "safe_softmax", "mask_before_op", "avoid_singular_op"),
    variable=("attn_weights",),
    line=("attn_weights = F.softmax(attn_weights, dim=-1)",),
)


class CrossAttention(nn.Module):
    def __init__(self, dim, dim_image, heads=2, head_dim=4):
        super().__init__()
        self.heads, self.scale = heads, head_dim**-0.5
        self.q_proj = nn.Linear(dim, heads * head_dim, bias=False)
        self.k_proj = nn.Linear(dim_image, heads * head_dim, bias=False)
        self.v_proj = nn.Linear(dim_image, heads * head_dim, bias=False)
        self.o_proj = nn.Linear(heads * head_dim, dim, bias=False)

    def split(self, t):
        return t.unflatten(-1, (self.heads, -1)).transpose(1, 2)

    def forward(self, hidden_states, image_states, attention_mask):
        q = self.split(self.q_proj(hidden_states)) * self.scale
        k, v = self.split(self.k_proj(image_states)), self.split(self.v_proj(image_states))
        attn_weights = q @ k.transpose(-1, -2) + attention_mask
        attn_weights = F.softmax(attn_weights, dim=-1)
        return self.o_proj((attn_weights @ v).transpose(1, 2).flatten(2))


class GatedCrossAttentionLayer(nn.Module):
    def __init__(self, dim, dim_image):
        super().__init__()
        self.input_layernorm = nn.RMSNorm(dim)
        self.cross_attn = CrossAttention(dim, dim_image)
        self.alpha_cross_attn = nn.Parameter(torch.full((1,), 0.1))

    def forward(self, hidden_states, image_states, image_attention_mask, cross_attention_gate):
        residual = hidden_states
        hidden_states = self.cross_attn(self.input_layernorm(hidden_states), image_states, image_attention_mask)
        hidden_states = hidden_states.masked_fill((cross_attention_gate == 0)[:, :, None], 0.0)
        return residual + torch.tanh(self.alpha_cross_attn) * hidden_states


class Idefics(nn.Module):
    def __init__(self, vocab=24, dim=8, dim_image=6):
        super().__init__()
        self.embed_tokens = nn.Embedding(vocab, dim)
        self.layer = GatedCrossAttentionLayer(dim, dim_image)
        self.lm_head = nn.Linear(dim, vocab, bias=False)

    def forward(self, input_ids, image_states, image_mask):
        bias = torch.zeros(image_mask.shape).masked_fill(~image_mask, float("-inf"))[:, None]
        gate = image_mask.any(dim=-1).float()
        return self.lm_head(self.layer(self.embed_tokens(input_ids), image_states, bias, gate))


def build():
    torch.manual_seed(242)
    image_token_id, patches = 23, 3
    model = Idefics()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    input_ids = torch.randint(0, 23, (2, 7))
    input_ids[0, [0, 4]] = image_token_id
    input_ids[1, [2, 5]] = image_token_id  # "Here is a picture: <image> ..."
    image_states = torch.randn(2, 2 * patches, 6)
    seen = (input_ids == image_token_id).cumsum(dim=-1)
    image_of_patch = torch.arange(1, 3).repeat_interleave(patches)
    image_mask = seen[:, :, None] == image_of_patch
    return SimpleNamespace(model=model, optimizer=optimizer, input_ids=input_ids, image_states=image_states, image_mask=image_mask)


def run(s=None):
    s = s or build()
    logits = s.model(s.input_ids, s.image_states, s.image_mask)
    labels = s.input_ids.masked_fill(s.input_ids == 23, -100)
    loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)
    s.optimizer.zero_grad()
    loss.backward()
    s.optimizer.step()
    return loss
