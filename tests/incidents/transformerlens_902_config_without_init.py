"""Fine-tuning a hooked transformer that was built from the config of another one (TransformerLens).

The attention weights are made with torch.empty and filled by init_weights(), which only runs if the config says so. The config came from a pretrained model
(init_weights=False there, because the checkpoint fills them); no checkpoint is loaded here, and W_O of both blocks is memory that nobody wrote.
(The deterministic mode of torch fills such memory with NaN, so that the script does the same on every machine.)
Source: https://github.com/TransformerLensOrg/TransformerLens/issues/902
Heals: initialising the weights.  Does not: a smaller rate, gradient clipping, fp32.
"""

from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F
from expected import Expected

EXPECTED = Expected(
    phase=("weights",),
    cause=("uninitialized", "poisoned_weights"),
    op=("einsum", "bmm", "empty"),
    index=None,
    masked=None,
    role=("weights",),
    fix=("initialise_memory", "fix_upstream", "validate_config"),
    variable=("blocks.0.attn.W_O",),
    line=('return torch.einsum("bqhe,hed->bqd", z, self.W_O)', "self.W_O = nn.Parameter(torch.empty(h, e, d))"),
)


class HookedAttention(nn.Module):
    def __init__(self, d, h):
        super().__init__()
        e = d // h
        self.W_Q = nn.Parameter(torch.empty(h, d, e))
        self.W_K = nn.Parameter(torch.empty(h, d, e))
        self.W_V = nn.Parameter(torch.empty(h, d, e))
        self.W_O = nn.Parameter(torch.empty(h, e, d))

    def forward(self, x):
        q, k, v = (torch.einsum("btd,hde->bthe", x, w) for w in (self.W_Q, self.W_K, self.W_V))
        scores = torch.einsum("bqhe,bkhe->bhqk", q, k) / q.shape[-1] ** 0.5
        t = x.shape[1]
        scores = scores.masked_fill(torch.ones(t, t, dtype=torch.bool).triu(1), torch.finfo(scores.dtype).min)
        z = torch.einsum("bhqk,bkhe->bqhe", scores.softmax(-1), v)
        return torch.einsum("bqhe,hed->bqd", z, self.W_O)


class Block(nn.Module):
    def __init__(self, d, h):
        super().__init__()
        self.ln1 = nn.LayerNorm(d)
        self.attn = HookedAttention(d, h)

    def forward(self, x):
        return x + self.attn(self.ln1(x))


class HookedTransformer(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.embed = nn.Embedding(cfg["d_vocab"], cfg["d_model"])
        self.blocks = nn.ModuleList(Block(cfg["d_model"], cfg["n_heads"]) for _ in range(2))
        self.ln_final = nn.LayerNorm(cfg["d_model"])
        self.unembed = nn.Linear(cfg["d_model"], cfg["d_vocab"], bias=False)
        self.init_weights(everything=cfg["init_weights"])

    def init_weights(self, everything):
        for name, param in self.named_parameters():
            if name.endswith(("W_Q", "W_K", "W_V")) or (everything and name.endswith("W_O")):
                nn.init.normal_(param, std=0.02)

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.unembed(self.ln_final(x))


def build():
    torch.manual_seed(4)
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    model = HookedTransformer({"d_vocab": 26, "d_model": 16, "n_heads": 2, "init_weights": False})
    torch.use_deterministic_algorithms(before)
    return SimpleNamespace(
        model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3), batch={"input_ids": torch.randint(0, 26, (2, 9))}
    )


def run(s=None):
    s = s or build()
    ids = s.batch["input_ids"]
    for _ in range(2):
        loss = F.cross_entropy(s.model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        s.optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(s.model.parameters(), 1.0)
        s.optimizer.step()
    return loss.item()


if __name__ == "__main__":
    print(run())
