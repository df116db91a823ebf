"""transformers #18368 - the relative position biases u and v of a conformer block come from torch.Tensor(heads, dim): memory nobody wrote.

`nn.Parameter(torch.Tensor(h, d))` allocates and writes nothing.  With an unlucky allocation (deterministic mode fills such memory with NaN)
the two biases are NaN from the start, so are the attention scores of every frame, the loss, and after one step all weights.

Source: https://github.com/huggingface/transformers/pull/18368
Heals: torch.zeros instead of torch.Tensor.  Tempting and no help: nan_to_num of the scores (the biases stay NaN), a smaller learning rate,
a NaN check that skips the step (every step is skipped).
"""

import math
from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F

from expected import Expected

EXPECTED = Expected(
    phase=("weights", "forward"),
    cause=("uninitialized", "poisoned_weights"),
    op=("any", "uninitialized", "empty", "Tensor", "add"),
    index=None,
    masked=None,
    role=("weights", "attention", "hidden"),
    fix=("initialise_memory",),
    variable=("encoder.0.attn.pos_bias_u", "pos_bias_u", "query_with_bias_u", None),
    line=(
        "query_with_bias_u = (query + self.pos_bias_u).transpose(1, 2)",
        "self.pos_bias_u = nn.Parameter(torch.Tensor(num_heads, self.head_size))",
        None,
    ),
)


class ConformerSelfAttention(nn.Module):
    """Multi-head attention with the relative positions of Transformer-XL."""

    def __init__(self, dim=16, num_heads=2):
        super().__init__()
        self.num_heads = num_heads
        self.head_size = dim // num_heads
        self.linear_q = nn.Linear(dim, dim)
        self.linear_k = nn.Linear(dim, dim)
        self.linear_v = nn.Linear(dim, dim)
        self.linear_pos = nn.Linear(dim, dim, bias=False)
        self.linear_out = nn.Linear(dim, dim)
        self.pos_bias_u = nn.Parameter(torch.Tensor(num_heads, self.head_size))
        self.pos_bias_v = nn.Parameter(torch.Tensor(num_heads, self.head_size))

    def forward(self, x, pos):
        batch, frames, _ = x.shape
        query = self.linear_q(x).view(batch, frames, self.num_heads, self.head_size)
        key = self.linear_k(x).view(batch, frames, self.num_heads, self.head_size).transpose(1, 2)
        value = self.linear_v(x).view(batch, frames, self.num_heads, self.head_size).transpose(1, 2)
        relative = self.linear_pos(pos).view(1, -1, self.num_heads, self.head_size).transpose(1, 2)

        query_with_bias_u = (query + self.pos_bias_u).transpose(1, 2)
        query_with_bias_v = (query + self.pos_bias_v).transpose(1, 2)
        scores_ac = query_with_bias_u @ key.transpose(-2, -1)
        scores_bd = self.relative_shift(query_with_bias_v @ relative.transpose(-2, -1), frames)
        probs = torch.softmax((scores_ac + scores_bd) / math.sqrt(self.head_size), dim=-1)
        out = (probs @ value).transpose(1, 2).reshape(batch, frames, -1)
        return self.linear_out(out)

    @staticmethod
    def relative_shift(scores, frames):
        offsets = torch.arange(frames).view(-1, 1) - torch.arange(frames).view(1, -1) + frames - 1
        return scores.gather(-1, offsets.expand(*scores.shape[:2], -1, -1))


class ConformerLayer(nn.Module):
    def __init__(self, dim=16):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.attn = ConformerSelfAttention(dim)
        self.ff = nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, 2 * dim), nn.SiLU(), nn.Linear(2 * dim, dim))

    def forward(self, x, pos):
        x = x + self.attn(self.norm(x), pos)
        return x + 0.5 * self.ff(x)


class Recogniser(nn.Module):
    def __init__(self, dim=16, vocab=12, frames=9):
        super().__init__()
        self.frontend = nn.Linear(20, dim)
        self.encoder = nn.ModuleList([ConformerLayer(dim)])
        self.head = nn.Linear(dim, vocab)
        positions = torch.arange(2 * frames - 1).float().unsqueeze(1) - (frames - 1)
        freq = torch.exp(torch.arange(0, dim, 2) * (-math.log(10000.0) / dim))
        self.register_buffer("pos", torch.cat([(positions * freq).sin(), (positions * freq).cos()], dim=-1))

    def forward(self, features):
        x = self.frontend(features)
        for layer in self.encoder:
            x = layer(x, self.pos)
        return self.head(x)


def build():
    torch.manual_seed(18)
    torch.use_deterministic_algorithms(True)  # reproducible runs; fresh memory is then filled with NaN
    model = Recogniser()
    features = torch.randn(3, 9, 20)
    labels = torch.randint(0, 12, (3, 9))
    return SimpleNamespace(model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=3e-4), features=features, labels=labels)


def run(s=None):
    s = s or build()
    logits = s.model(s.features)
    loss = F.cross_entropy(logits.flatten(0, 1), s.labels.flatten())
    loss.backward()
    s.optimizer.step()
    s.optimizer.zero_grad()
    return loss


if __name__ == "__main__":
    run()
