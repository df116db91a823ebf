"""Balanced class weights n / (k * count): the class without samples has weight inf, and cross_entropy never reads it.

nll_loss takes the weight of each row's label only (forward, normaliser and backward), so the inf of the absent class does no harm. (With
label_smoothing > 0 it would.) Loss, gradients and weights are finite and the same as with any finite weight in that place.
Source: the discussion of https://github.com/webis-de/small-text/issues/39 and https://github.com/pytorch/pytorch/issues/104776.
"""

from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F


class SequenceClassifier(nn.Module):
    def __init__(self, vocab=40, dim=16, num_labels=5):
        super().__init__()
        self.embeddings = nn.Embedding(vocab, dim, padding_idx=0)
        self.attention = nn.Linear(dim, 1)
        self.dropout = nn.Dropout(0.0)
        self.classifier = nn.Linear(dim, num_labels)

    def forward(self, ids):
        x = self.embeddings(ids)
        scores = self.attention(x).squeeze(-1).masked_fill(ids == 0, float("-inf"))
        pooled = (scores.softmax(-1).unsqueeze(-1) * x).sum(1)
        return self.classifier(self.dropout(pooled))


def get_class_weights(y, num_classes):
    counts = torch.bincount(y, minlength=num_classes).float()
    return y.numel() / (num_classes * counts)


def build():
    torch.manual_seed(39)
    model = SequenceClassifier()
    ids = torch.randint(1, 40, (12, 9))
    ids[4, 6:] = 0
    ids[9, 3:] = 0
    y = torch.tensor([0, 1, 1, 2, 0, 4, 4, 1, 0, 2, 1, 0])  # no label 3 in the labelled set
    class_weights = get_class_weights(y, 5)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return SimpleNamespace(model=model, optimizer=optimizer, ids=ids, y=y, class_weights=class_weights)


def run(s=None):
    s = s or build()
    loss = None
    for _ in range(2):
        logits = s.model(s.ids)
        loss = F.cross_entropy(logits, s.y, weight=s.class_weights)
        s.optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(s.model.parameters(), 1.0)
        s.optimizer.step()
    return loss
