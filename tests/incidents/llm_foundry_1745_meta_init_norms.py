"""FSDP-style start of a fine-tuning run on the meta device: the norm layers are materialised but nobody initialises them.

The model is built on meta, materialised with to_empty and then walked with the model's own _init_weights, which knows Linear and Embedding only.
The gains of the RMSNorm layers are never written: they hold whatever the allocator returned (here filled as the deterministic mode fills it).
The first forward multiplies by a NaN gain, and loss and every gradient are NaN.
Source: https://github.com/mosaicml/llm-foundry/pull/1745 (RMSNorm modules are skipped by model._init_weights after meta init)
Heals: initialising the norms (ones). Does not: lower learning rate, clipping, fp32, skipping the step (the weights stay as they are).
"""

from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import nn

from expected import Expected

EXPECTED = Expected(
    phase=("weights",),
    cause=("uninitialized", "poisoned_weights"),
    op=("empty_like", "empty", "to_empty", "mul"),
    index=None,
    masked=None,
    role=("weights",),
    fix=("initialise_memory", "fix_upstream"),
    variable=("layers.0.input_layernorm.weight",),
    line=("return self.weight * (hidden_states * torch.rsqrt(variance + self.eps))", 'model.to_empty(device="cpu")'),
)


class RMSNorm(nn.Module):
    def __init__(self, hidden, eps=1e-6):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden))
        self.eps = eps

    def forward(self, hidden_states):
        variance = hidden_states.pow(2).mean(-1, keepdim=True)
        return self.weight * (hidden_states * torch.rsqrt(variance + self.eps))


class DecoderLayer(nn.Module):
    def __init__(self, hidden):
        super().__init__()
        self.input_layernorm = RMSNorm(hidden)
        self.gate_up = nn.Linear(hidden, 4 * hidden, bias=False)
        self.down = nn.Linear(2 * hidden, hidden, bias=False)

    def forward(self, x):
        gate, up = self.gate_up(self.input_layernorm(x)).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * up)


class LlamaLike(nn.Module):
    def __init__(self, vocab=19, hidden=8, n_layers=2):
        super().__init__()
        self.embed_tokens = nn.Embedding(vocab, hidden)
        self.layers = nn.ModuleList(DecoderLayer(hidden) for _ in range(n_layers))
        self.norm = RMSNorm(hidden)
        self.lm_head = nn.Linear(hidden, vocab, bias=False)

    def _init_weights(self, module):
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.02)
        elif isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)

    def forward(self, ids):
        x = self.embed_tokens(ids)
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(self.norm(x))


def build():
    torch.manual_seed(17)
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        with torch.device("meta"):
            model = LlamaLike()
        model.to_empty(device="cpu")
    finally:
        torch.use_deterministic_algorithms(before)
    model.apply(model._init_weights)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    return SimpleNamespace(model=model, optimizer=optimizer, batch={"input_ids": torch.randint(0, 19, (2, 7))})


def run(s=None):
    s = s or build()
    out = []
    for _ in range(2):
        ids = s.batch["input_ids"]
        logits = s.model(ids)
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        s.optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(s.model.parameters(), 1.0)
        s.optimizer.step()
        out.append(loss.item())
    return out


if __name__ == "__main__":
    print(run())
