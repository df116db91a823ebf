"""O1-Pruner: the weight of a solution is (average length - length) / length + alpha * (correct - accuracy), and one problem came back empty K times.

A problem whose prompt was over the limit of the serving engine has K empty solutions: average length 0, length 0, length term 0 / 0 = NaN. (A single empty solution is harmless: x / 0 = inf is
cut to the upper bound of the weight.) NaN passes through the bounds of the clamp, the standardisation over the data set takes its mean, and all weights are NaN.

Source: https://github.com/StarDewXXX/O1-Pruner/blob/main/o1_scripts/construct_dataset.py, src/llamafactory/train/wsft/trainer.py
Heals: a length of at least one token in the denominator, dropping the problem without any text before the standardisation.
Does not: the bounds of the weight, an epsilon beside the standard deviation, masking the empty rows in the loss.
"""

from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import nn

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("zero_div_zero",),
    op=("div",),
    index=(2, 0),
    masked=None,
    role=("rewards", "advantages", "hidden"),
    fix=("clamp_denominator", "drop_invalid_sample", "reject_input", "guard_empty", "clamp_input", "fix_upstream"),
    variable=("length_term",),
    line=("length_term = (avg_length - length) / length",),
)


def pruning_weights(length, correct, alpha=2.0, lower_bound=-2.0, upper_bound=4.0):
    avg_length = length.mean(dim=1, keepdim=True)
    avg_acc = correct.mean(dim=1, keepdim=True)
    length_term = (avg_length - length) / length
    acc_term = alpha * (correct - avg_acc)
    weight = (length_term + acc_term).clamp(lower_bound, upper_bound)
    return (weight - weight.mean()) / weight.std(unbiased=False)


class SolutionModel(nn.Module):
    def __init__(self, vocab=36, dim=18):
        super().__init__()
        self.embed_tokens = nn.Embedding(vocab, dim, padding_idx=0)
        self.ff = nn.Sequential(nn.Linear(dim, dim), nn.SiLU(), nn.Linear(dim, dim))
        self.lm_head = nn.Linear(dim, vocab)

    def forward(self, input_ids):
        x = self.embed_tokens(input_ids)
        return self.lm_head(x + self.ff(x))


def weighted_sft_loss(logits, labels, weight):
    per_token = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100, reduction="none")
    per_token = per_token.view(labels.shape[0], -1)
    counted = (labels[:, 1:] != -100).float()
    per_sample = (per_token * counted).sum(-1) / counted.sum(-1).clamp(min=1)
    return (per_sample * weight).mean()


def build():
    torch.manual_seed(13)
    model = SolutionModel()
    length = torch.tensor([[9, 5, 7, 3], [4, 5, 6, 8], [0, 0, 0, 0], [6, 9, 9, 2]], dtype=torch.float32)
    correct = torch.tensor([[1, 1, 0, 1], [0, 0, 1, 1], [0, 0, 0, 0], [1, 0, 0, 0]], dtype=torch.float32)
    input_ids = torch.randint(1, 36, (4, 4, 12))
    labels = input_ids.clone()
    position = torch.arange(12)
    labels[(position < 3) | (position >= 3 + length.long()[..., None])] = -100
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4)
    batch = {"input_ids": input_ids, "labels": labels, "length": length, "correct": correct}
    return SimpleNamespace(model=model, optimizer=optimizer, batch=batch)


def run(s=None):
    s = s or build()
    weight = pruning_weights(s.batch["length"], s.batch["correct"])
    losses = []
    for problem in (0, 3):  # the problem without text is not even in the batches
        loss = weighted_sft_loss(s.model(s.batch["input_ids"][problem]), s.batch["labels"][problem], weight[problem])
        s.optimizer.zero_grad()
        loss.backward()
        s.optimizer.step()
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    print(run())
