"""torchtune, knowledge-distillation recipe (https://github.com/meta-pytorch/torchtune/blob/main/recipes/knowledge_distillation_single_device.py).

The recipe sums the loss over tokens, counts the tokens that carry a label over the accumulation window and multiplies every gradient by
1 / num_tokens before the step. In this window every dialogue was cut inside a tool turn, so no label is left: the losses and gradients are
exactly 0, the factor is inf, and 0 * inf writes NaN into every gradient and weight. Skipping the window or clamping the count heals it.
Guarding the loss (it is a clean 0) or clipping the gradient norm does not.
"""

from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F

from expected import Expected

EXPECTED = Expected(
    phase=("optimizer", "backward", "forward"),
    cause=("zero_denominator", "empty_mask_mean", "zero_div_zero"),
    op=("reciprocal", "div", "true_divide"),
    index=(),
    masked=None,
    role=("grad", "loss", "optimizer"),
    fix=("guard_empty", "clamp_denominator", "skip_bad_step", "drop_invalid_sample"),
    variable=("scaler",),
    line=("scaler = 1 / num_tokens",),
)

IGNORE_INDEX = -100


class TinyDecoder(nn.Module):
    def __init__(self, vocab=23, dim=12):
        super().__init__()
        self.tok_embeddings = nn.Embedding(vocab, dim)
        self.layer = nn.Sequential(nn.Linear(dim, 2 * dim), nn.SiLU(), nn.Linear(2 * dim, dim))
        self.norm = nn.LayerNorm(dim)
        self.output = nn.Linear(dim, vocab, bias=False)

    def forward(self, tokens):
        h = self.tok_embeddings(tokens)
        return self.output(self.norm(h + self.layer(h)))


def forward_kl_sum(student_logits, teacher_logits, labels):
    keep = labels != IGNORE_INDEX
    teacher_prob = teacher_logits.softmax(-1)
    x = (teacher_prob * student_logits.log_softmax(-1)).sum(-1)
    return -(x * keep).sum()


def scale_grads(model, scaler):
    for p in model.parameters():
        if p.grad is not None:
            p.grad *= scaler


def build():
    torch.manual_seed(503)
    model, teacher = TinyDecoder(), TinyDecoder(dim=16)
    window = []
    for _ in range(2):
        tokens = torch.randint(0, 23, (2, 10))
        window.append(dict(tokens=tokens, labels=torch.full_like(tokens, IGNORE_INDEX)))
    return SimpleNamespace(
        model=model,
        teacher=teacher.requires_grad_(False),
        window=window,
        kd_ratio=0.5,
        optimizer=torch.optim.AdamW(model.parameters(), lr=3e-4),
    )


def run(s=None):
    s = s or build()
    running_loss, num_tokens = 0, 0
    s.optimizer.zero_grad(set_to_none=True)
    for batch in s.window:
        labels = F.pad(batch["labels"][:, 1:], (0, 1), value=IGNORE_INDEX)
        num_tokens += (labels != IGNORE_INDEX).sum()
        logits = s.model(batch["tokens"])
        teacher_logits = s.teacher(batch["tokens"])
        class_loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORE_INDEX, reduction="sum")
        kd_loss = forward_kl_sum(logits, teacher_logits, labels)
        current_loss = (1 - s.kd_ratio) * class_loss + s.kd_ratio * kd_loss
        current_loss.backward()
        running_loss += current_loss.detach()
    scaler = 1 / num_tokens
    scale_grads(s.model, scaler)
    s.optimizer.step()
    return running_loss


if __name__ == "__main__":
    run()
