"""The second linear of the T5 feed-forward block reaches about 7e4 under fp16 autocast, beyond the largest half value.
https://github.com/huggingface/transformers/issues/5651
"""

from types import SimpleNamespace

import torch
import torch.nn as nn

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("fp16_overflow",),
    op=("mm",),
    index=(7, 2),
    masked=False,
    role=("hidden",),
    fix=("upcast_fp32",),
    variable=("h",),
    line=("h = self.wo(h)",),
)


class T5LayerNorm(nn.Module):
    def __init__(self, dim, eps=1e-6):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x):
        variance = x.float().pow(2).mean(-1, keepdim=True)
        return self.weight * (x * torch.rsqrt(variance + self.eps))


class T5DenseReluDense(nn.Module):
    def __init__(self, d_model=8, d_ff=16):
        super().__init__()
        self.wi = nn.Linear(d_model, d_ff, bias=False)
        self.wo = nn.Linear(d_ff, d_model, bias=False)

    def forward(self, hidden_states):
        h = torch.relu(self.wi(hidden_states))
        h = self.wo(h)
        return h


class Block(nn.Module):
    def __init__(self, vocab=14, d_model=8):
        super().__init__()
        self.shared = nn.Embedding(vocab, d_model)
        self.norm_in, self.norm_out = T5LayerNorm(d_model), T5LayerNorm(d_model)
        self.ff = T5DenseReluDense(d_model)
        self.lm_head = nn.Linear(d_model, vocab, bias=False)

    def forward(self, packed_ids):
        x = self.shared(packed_ids)
        x = x + self.ff(self.norm_in(x))
        return self.lm_head(self.norm_out(x))


def build():
    torch.manual_seed(5651)
    model = Block()
    with torch.no_grad():
        model.ff.wi.weight.mul_(30.0)
        model.ff.wi.weight[:, 4] = 0.0
        model.shared.weight[:, 4] = 0.0
        model.shared.weight[9] = torch.tensor([0.0, 0.0, 0.0, 0.0, 8.0, 0.0, 0.0, 0.0])
        model.ff.wi.weight[:, 4] = 100.0
        model.ff.wo.weight[2] = 16.0
    packed_ids = torch.tensor([1, 4, 2, 8, 5, 7, 3, 9, 10, 6, 0, 2])
    labels = packed_ids.roll(-1)
    return SimpleNamespace(model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-4), batch=(packed_ids, labels))


def run(s=None):
    s = s or build()
    packed_ids, labels = s.batch
    with torch.autocast("cpu", dtype=torch.float16):
        logits = s.model(packed_ids)
    loss = nn.functional.cross_entropy(logits.float(), labels)
    s.optimizer.zero_grad()
    loss.backward()
    s.optimizer.step()
    return loss
