"""LoRA on a text-to-video DiT whose pruned checkpoint runs its blocks in float16.

adaln_proj computes the gates in float32; for the text rows they are about 1e5, and the cast to the dtype of the block makes them inf.  Nobody
reads these rows: the final layer selects the video tokens, so the loss looks normal.  In backward the zero gradient of the dropped rows is multiplied
with the inf gate, and the attention spreads the NaN into every adapter.

Source: https://github.com/ostris/ai-toolkit/pull/1046
Heals: the gate (and the product) in float32, a clamp of the gate to the range of float16, taking the video rows before the gate is applied.
Does not: masking the loss, clip_grad_norm_ (its norm is NaN), a loss scale, another optimizer.
"""

from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F

from expected import Expected

EXPECTED = Expected(
    phase=("backward",),
    cause=("fp16_overflow", "where_grad_trap"),
    op=("to", "_to_copy"),
    index=(0, 0, 3),
    masked=True,
    role=("hidden",),
    fix=("upcast_fp32", "clamp_input", "mask_before_op", "where_on_detached"),
    variable=("gate",),
    line=("gate = modulation.to(dt)",),
)

DIM, N_TEXT, N_VIDEO = 16, 3, 5


class LoRALinear(nn.Module):
    def __init__(self, base, rank=4):
        super().__init__()
        self.base = base.half().requires_grad_(False)
        self.lora_A = nn.Parameter(torch.randn(rank, base.in_features) / rank)
        self.lora_B = nn.Parameter(torch.zeros(base.out_features, rank))

    def forward(self, x):
        return self.base(x) + F.linear(F.linear(x.float(), self.lora_A), self.lora_B).to(x.dtype)


class DiTBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = LoRALinear(nn.Linear(DIM, 3 * DIM))
        self.mlp_in = LoRALinear(nn.Linear(DIM, 2 * DIM))
        self.mlp_out = LoRALinear(nn.Linear(2 * DIM, DIM))
        self.adaln_proj = nn.Linear(DIM, 2 * DIM).requires_grad_(False)

    def forward(self, x, temb, is_text):
        dt = x.dtype
        gate_video, gate_text = self.adaln_proj(F.silu(temb.float())).unsqueeze(1).chunk(2, dim=-1)
        modulation = torch.where(is_text.view(1, -1, 1), gate_text, gate_video)
        q, k, v = self.qkv(F.layer_norm(x, (DIM,))).chunk(3, dim=-1)
        x = x + F.scaled_dot_product_attention(q, k, v)
        hidden = self.mlp_out(F.gelu(self.mlp_in(F.layer_norm(x, (DIM,)))))
        gate = modulation.to(dt)
        return x + gate * hidden


class VideoDiT(nn.Module):
    def __init__(self):
        super().__init__()
        self.block = DiTBlock()
        self.final_layer = nn.Linear(DIM, DIM).half().requires_grad_(False)
        self.register_buffer("is_text", torch.arange(N_TEXT + N_VIDEO) < N_TEXT)
        self.register_buffer("video_index", torch.arange(N_TEXT, N_TEXT + N_VIDEO))

    def forward(self, text, latents, temb):
        x = self.block(torch.cat([text, latents], dim=1), temb, self.is_text)
        return self.final_layer(x.index_select(1, self.video_index))


def build():
    torch.manual_seed(1046)
    model = VideoDiT()
    with torch.no_grad():
        model.block.adaln_proj.bias[DIM + 3] = 1.1e5  # the massive channels of the text stream
        model.block.adaln_proj.bias[DIM + 8] = -9.0e4
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4)
    batch = dict(text=torch.randn(2, N_TEXT, DIM).half(), latents=torch.randn(2, N_VIDEO, DIM).half(), temb=torch.randn(2, DIM))
    target = torch.randn(2, N_VIDEO, DIM)
    return SimpleNamespace(model=model, optimizer=optimizer, batch=batch, target=target)


def run(s=None):
    s = s or build()
    losses = []
    for _ in range(2):
        s.optimizer.zero_grad()
        noise_pred = s.model(**s.batch)
        loss = F.mse_loss(noise_pred.float(), s.target)
        loss.backward()
        s.optimizer.step()
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    print(run())
