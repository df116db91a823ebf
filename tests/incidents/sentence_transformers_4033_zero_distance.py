"""An anchor equal to its positive has Euclidean distance 0, and the gradient of sqrt there is infinite although the triplet loss is fine.
https://github.com/huggingface/sentence-transformers/pull/4033
"""

from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F

from expected import Expected

EXPECTED = Expected(
    phase=("backward",),
    cause=("sqrt_zero_grad",),
    op=("sqrt", "div"),
    index=(3,),
    masked=False,
    role=("loss", "hidden"),
    fix=("avoid_singular_op", "clamp_denominator"),
    variable=(None,),
    line=("return -torch.sqrt(torch.sum((a - b) ** 2, dim=-1))",),
)


def pairwise_euclidean_sim(a, b):
    return -torch.sqrt(torch.sum((a - b) ** 2, dim=-1))


class TripletLoss(nn.Module):
    def __init__(self, model, triplet_margin=1.5):
        super().__init__()
        self.model = model
        self.triplet_margin = triplet_margin

    def forward(self, sentence_features):
        rep_anchor, rep_pos, rep_neg = (self.model(f) for f in sentence_features)
        distance_pos = -pairwise_euclidean_sim(rep_anchor, rep_pos)
        distance_neg = -pairwise_euclidean_sim(rep_anchor, rep_neg)
        losses = F.relu(distance_pos - distance_neg + self.triplet_margin)
        return losses.mean()


class MeanPoolingEncoder(nn.Module):
    def __init__(self, vocab=40, dim=8):
        super().__init__()
        self.embeddings = nn.Embedding(vocab, dim)
        self.dense = nn.Linear(dim, dim)

    def forward(self, features):
        mask = features["attention_mask"].unsqueeze(-1).float()
        pooled = (self.embeddings(features["input_ids"]) * mask).sum(1) / mask.sum(1)
        return torch.tanh(self.dense(pooled))


def build():
    torch.manual_seed(4033)
    model = MeanPoolingEncoder()
    ids = [torch.randint(1, 40, (5, 6)) for _ in range(3)]
    ids[1][3] = ids[0][3]  # the preference data repeats one answer
    features = [{"input_ids": x, "attention_mask": torch.ones_like(x)} for x in ids]
    return SimpleNamespace(model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=2e-5), batch=features, loss=TripletLoss(model))


def run(s=None):
    s = s or build()
    value = s.loss(s.batch)
    s.optimizer.zero_grad()
    value.backward()
    s.optimizer.step()
    return value
