"""SASRec.pytorch, left-padded histories - healthy.

Causal attention puts -inf above the diagonal, padded items are zero vectors under LayerNorm with eps 1e-8, and the hit-rate log ranks scores with -inf at the
padding item and at seen ones. Every row keeps its own position, the norm of a zero row is 0 / 1e-4, and the loss is taken by index where pos != 0. (Source:
pmixer/SASRec.pytorch, python/model.py, log2feats and main.py.)
"""

from types import SimpleNamespace

import torch
from torch import nn


class SASRec(nn.Module):
    def __init__(self, item_num=15, hidden=8, maxlen=6):
        super().__init__()
        self.item_emb = nn.Embedding(item_num + 1, hidden, padding_idx=0)
        self.pos_emb = nn.Embedding(maxlen + 1, hidden, padding_idx=0)
        self.attention_layernorm = nn.LayerNorm(hidden, eps=1e-8)
        self.attention_layer = nn.MultiheadAttention(hidden, 2)
        self.last_layernorm = nn.LayerNorm(hidden, eps=1e-8)

    def log2feats(self, log_seqs):
        seqs = self.item_emb(log_seqs) * self.item_emb.embedding_dim**0.5
        poss = torch.arange(1, log_seqs.shape[1] + 1).repeat(log_seqs.shape[0], 1) * (log_seqs != 0)
        seqs = seqs + self.pos_emb(poss)
        tl = seqs.shape[1]
        attention_mask = torch.zeros(tl, tl).masked_fill(~torch.tril(torch.ones(tl, tl, dtype=torch.bool)), float("-inf"))
        seqs = seqs.transpose(0, 1)
        x = self.attention_layernorm(seqs)
        seqs = (seqs + self.attention_layer(x, x, x, attn_mask=attention_mask)[0]).transpose(0, 1)
        return self.last_layernorm(seqs)

    def forward(self, log_seqs, pos_seqs, neg_seqs):
        log_feats = self.log2feats(log_seqs)
        return (log_feats * self.item_emb(pos_seqs)).sum(-1), (log_feats * self.item_emb(neg_seqs)).sum(-1)


def build():
    torch.manual_seed(8)
    model = SASRec()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, betas=(0.9, 0.98))
    seq = torch.tensor([[0, 0, 0, 0, 3, 9], [1, 2, 3, 4, 5, 6], [0, 0, 0, 0, 0, 0]])
    pos = torch.tensor([[0, 0, 0, 0, 9, 12], [2, 3, 4, 5, 6, 7], [0, 0, 0, 0, 0, 11]])
    neg = torch.tensor([[0, 0, 0, 0, 1, 2], [8, 9, 10, 11, 12, 13], [0, 0, 0, 0, 0, 4]])
    return SimpleNamespace(model=model, optimizer=optimizer, batch=dict(seq=seq, pos=pos, neg=neg), log={})


def run(s=None):
    s = s or build()
    seq, pos, neg = s.batch["seq"], s.batch["pos"], s.batch["neg"]
    pos_logits, neg_logits = s.model(seq, pos, neg)
    indices = torch.where(pos != 0)
    bce_criterion = nn.BCEWithLogitsLoss()
    loss = bce_criterion(pos_logits[indices], torch.ones_like(pos_logits[indices]))
    loss = loss + bce_criterion(neg_logits[indices], torch.zeros_like(neg_logits[indices]))
    s.optimizer.zero_grad()
    loss.backward()
    s.optimizer.step()
    with torch.no_grad():
        scores = s.model.log2feats(seq)[:, -1] @ s.model.item_emb.weight.T
        scores = scores.scatter(1, seq, float("-inf"))
        s.log["rank"] = (scores > scores.gather(1, pos[:, -1:])).sum(1)
    return loss


if __name__ == "__main__":
    print(run())
