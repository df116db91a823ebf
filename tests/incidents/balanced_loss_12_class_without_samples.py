"""balanced-loss #12 - class-balanced weights (1 - beta) / (1 - beta ** n) for a class that has no samples.

n = 0 makes the effective number 0 and the weight inf; the normalisation turns it into inf / inf = NaN, and the product with the one-hot
labels (NaN * 0) puts NaN into every row, although nobody carries that label. Loss and gradients are NaN.
Source: https://github.com/fcakyon/balanced-loss/pull/12 ("labels with no samples in the training data").
Heals: a floor under the effective number or the counts, weight 0 for absent classes. Does not: gathering the weight of the label instead
of the one-hot product - the sum is inf, all other weights are x / inf = 0, the run is finite and learns nothing.
"""

from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("zero_denominator",),
    op=("div", "reciprocal"),
    index=(4,),
    masked=None,
    role=("is_weight", "loss", "weights", "hidden"),
    fix=("clamp_denominator", "guard_empty", "clamp_input", "mask_before_op", "where_on_detached", "validate_config", "fix_upstream"),
    variable=("weights", None),
    line=("weights = (1.0 - self.beta) / effective_num",),
)


class BalancedLoss(nn.Module):
    def __init__(self, samples_per_class, beta=0.999, fl_gamma=2.0):
        super().__init__()
        self.samples_per_class = samples_per_class
        self.beta = beta
        self.fl_gamma = fl_gamma

    def class_weights(self):
        num_classes = len(self.samples_per_class)
        effective_num = 1.0 - torch.pow(self.beta, self.samples_per_class)
        weights = (1.0 - self.beta) / effective_num
        return weights / weights.sum() * num_classes

    def focal_loss(self, logits, labels, alpha):
        bc_loss = F.binary_cross_entropy_with_logits(logits, labels, reduction="none")
        modulator = torch.exp(-self.fl_gamma * labels * logits - self.fl_gamma * torch.log1p(torch.exp(-logits)))
        loss = alpha * (modulator * bc_loss)
        return loss.sum() / labels.sum()

    def forward(self, logits, labels):
        labels_one_hot = F.one_hot(labels, len(self.samples_per_class)).float()
        class_weights = self.class_weights()
        alpha = (class_weights * labels_one_hot).sum(dim=1, keepdim=True)
        return self.focal_loss(logits, labels_one_hot, alpha)


class IntentClassifier(nn.Module):
    def __init__(self, vocab=50, dim=16, num_labels=6):
        super().__init__()
        self.embeddings = nn.EmbeddingBag(vocab, dim, mode="mean")
        self.dense = nn.Linear(dim, dim)
        self.out_proj = nn.Linear(dim, num_labels)

    def forward(self, ids):
        return self.out_proj(torch.tanh(self.dense(self.embeddings(ids))))


def build():
    torch.manual_seed(12)
    model = IntentClassifier()
    samples_per_class = torch.tensor([310.0, 2489.0, 114.0, 17.0, 0.0, 725.0])
    criterion = BalancedLoss(samples_per_class)
    ids = torch.randint(0, 50, (8, 10))
    labels = torch.tensor([1, 5, 0, 1, 2, 1, 3, 5])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return SimpleNamespace(model=model, optimizer=optimizer, criterion=criterion, ids=ids, labels=labels)


def run(s=None):
    s = s or build()
    s.optimizer.zero_grad()
    loss = s.criterion(s.model(s.ids), s.labels)
    loss.backward()
    s.optimizer.step()
    return loss
