"""Blockwise FP8 weight sync into a rollout worker (slime's block_fp8), truncated-importance policy gradient.

The trainer quantises its MLP weight tile by tile before it hands it to the rollout engine: scale = block_max / 448. One tile is all zeros (hidden units that were
pruned/zero-initialised), so its scale is 0 and the tile becomes 0/0 = NaN; clamp and the cast to float8 keep the NaN. The rollout log-probabilities are NaN, the
truncated importance weight is NaN and so is every gradient.
Source: https://github.com/THUDM/slime/pull/2256
Heals: block_max.clamp(min=1e-12).  Does not: clamping the quotient to +-448, clamping the importance weight.
"""

from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F
from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("zero_div_zero", "zero_denominator"),
    op=("div",),
    index=(1, 0, 0, 0),
    masked=None,
    role=("weights", "hidden"),
    fix=("clamp_denominator", "where_on_detached"),
    variable=("qweight",),
    line=("qweight = tiles / scale",),
)

FP8_MAX = torch.finfo(torch.float8_e4m3fn).max


def block_fp8(weight, block=(4, 4)):
    n, k = weight.shape
    tiles = weight.view(n // block[0], block[0], k // block[1], block[1]).permute(0, 2, 1, 3).float()
    block_max = tiles.abs().amax(dim=(2, 3), keepdim=True)
    scale = block_max / FP8_MAX
    qweight = tiles / scale
    fp8 = qweight.clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)
    return fp8, scale


def dequantise(fp8, scale):
    tiles = fp8.float() * scale
    return tiles.permute(0, 2, 1, 3).reshape(tiles.shape[0] * tiles.shape[2], -1)


class Policy(nn.Module):
    def __init__(self, vocab=20, dim=8, inner=12):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.up = nn.Linear(dim, inner, bias=False)
        self.head = nn.Linear(inner, vocab, bias=False)
        with torch.no_grad():
            self.up.weight[4:8] = 0  # units cut away by the pruned checkpoint

    def forward(self, ids):
        return self.head(F.silu(self.up(self.embed(ids))))


def token_log_probs(model, ids):
    logits = model(ids[:, :-1])
    return logits.log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)


def build():
    torch.manual_seed(0)
    model, engine = Policy(), Policy()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batch = {"input_ids": torch.randint(0, 20, (3, 7)), "advantages": torch.tensor([0.7, -0.4, 1.1])}
    return SimpleNamespace(model=model, engine=engine, optimizer=optimizer, batch=batch)


@torch.no_grad()
def update_weights(model, engine):
    state = model.state_dict()
    fp8, scale = block_fp8(state["up.weight"])
    state["up.weight"] = dequantise(fp8, scale)
    engine.load_state_dict(state)


def run(s=None):
    s = s or build()
    ids = s.batch["input_ids"]
    loss = None
    for _ in range(2):
        update_weights(s.model, s.engine)
        with torch.no_grad():
            rollout_log_probs = token_log_probs(s.engine, ids)
        log_probs = token_log_probs(s.model, ids)
        tis = torch.exp(log_probs.detach() - rollout_log_probs).clamp(max=2.0)
        loss = -(tis * s.batch["advantages"][:, None] * log_probs).mean()
        s.optimizer.zero_grad()
        loss.backward()
        s.optimizer.step()
    return loss.item()


if __name__ == "__main__":
    print(run())
