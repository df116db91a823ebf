"""nn.TransformerEncoder as a reward model, with boolean key padding and a float causal mask of -inf together."""

from types import SimpleNamespace

import torch
from torch import nn

HEALTHY = "two masks meet in the attention, many scores are -inf and the outputs of padded places are thrown away"


def build():
    torch.manual_seed(404)
    layer = nn.TransformerEncoderLayer(12, 3, dim_feedforward=20, dropout=0.0, batch_first=True, norm_first=True)
    enc = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    model = nn.ModuleDict({"emb": nn.Embedding(14, 12), "enc": enc, "score": nn.Linear(12, 1)})
    ids = torch.randint(1, 14, (6, 8))
    lengths = torch.tensor([8, 3, 5, 8, 1, 7])
    return SimpleNamespace(model=model, ids=ids, lengths=lengths, opt=torch.optim.AdamW(model.parameters(), lr=1e-3))


def run(s=None):
    s = s or build()
    m = s.model
    causal = torch.full((8, 8), float("-inf")).triu(diagonal=1)
    pad = torch.arange(8)[None] >= s.lengths[:, None]
    padding = torch.zeros(6, 8).masked_fill(pad, float("-inf"))
    for _ in range(3):
        h = m["enc"](m["emb"](s.ids), mask=causal, src_key_padding_mask=padding)
        r = m["score"](h[torch.arange(6), s.lengths - 1]).squeeze(-1)
        loss = -nn.functional.logsigmoid(r[0::2] - r[1::2]).mean()
        s.opt.zero_grad()
        loss.backward()
        s.opt.step()
    return loss
