"""A run resumes from a checkpoint that was written after a non-finite step; one projection holds NaN before training starts.
https://github.com/kyutai-labs/pocket-tts/pull/262
"""

import io
from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F

from expected import Expected

EXPECTED = Expected(
    phase=("weights",),
    cause=("poisoned_weights",),
    op=("previous_step", "mm", "addmm"),
    index=(0, 5),
    masked=None,
    role=("weights",),
    fix=("fix_upstream", "skip_bad_step"),
    variable=("out_proj.weight",),
    line=("x = x + self.out_proj(F.silu(gate) * up)",),
)


class Backbone(nn.Module):
    def __init__(self, vocab=18, dim=8):
        super().__init__()
        self.text_emb = nn.Embedding(vocab, dim)
        self.in_proj = nn.Linear(dim, 2 * dim, bias=False)
        self.out_proj = nn.Linear(dim, dim, bias=False)
        self.lm_head = nn.Linear(dim, vocab, bias=False)

    def forward(self, codes):
        x = self.text_emb(codes)
        gate, up = self.in_proj(x).chunk(2, dim=-1)
        x = x + self.out_proj(F.silu(gate) * up)
        return self.lm_head(x)


def save_checkpoint(model):
    buffer = io.BytesIO()
    torch.save({"model": model.state_dict(), "step": 65000}, buffer)
    return buffer.getvalue()


def load_last_checkpoint(model, blob):
    state = torch.load(io.BytesIO(blob), weights_only=True)
    model.load_state_dict(state["model"])
    return state["step"]


def build():
    torch.manual_seed(262)
    crashed = Backbone()
    with torch.no_grad():
        crashed.out_proj.weight[5, 1:] = float("nan")
    model = Backbone()
    step = load_last_checkpoint(model, save_checkpoint(crashed))
    codes = torch.randint(0, 18, (2, 9))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.95))
    return SimpleNamespace(model=model, optimizer=optimizer, batch=codes, step=step)


def run(s=None):
    s = s or build()
    logits = s.model(s.batch[:, :-1])
    loss = F.cross_entropy(logits.flatten(0, 1), s.batch[:, 1:].flatten())
    s.optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(s.model.parameters(), 1.0)
    s.optimizer.step()
    s.step += 1
    return loss
