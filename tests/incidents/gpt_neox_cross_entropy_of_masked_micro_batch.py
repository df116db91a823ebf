"""gpt-neox, supervised finetuning with a loss mask - one micro-batch of the accumulation holds prompt tokens only.

The packed sample of the second micro-batch is cut inside a long prompt, its loss_mask is all zero, and sum / loss_mask.sum() is 0/0. The gradients that were accumulated from
the first micro-batch become NaN too. Source: EleutherAI/gpt-neox, megatron/model/gpt2_model.py, cross_entropy (loss_mask.sum() in the denominator).
Heals: loss_mask.sum().clamp(min=1); an epsilon in the denominator; skipping such a micro-batch. Does not: nan_to_num of the loss (its backward is NaN all the same).
"""

from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("empty_mask_mean", "zero_div_zero"),
    op=("div", "truediv", "/"),
    index=(),
    masked=None,
    role=("loss",),
    fix=("clamp_denominator", "guard_empty", "drop_invalid_sample", "representable_eps", "skip_bad_step", "fix_upstream"),
    variable=("loss",),
    line=("loss = torch.sum(losses.view(-1) * loss_mask) / loss_mask.sum()",),
)


class GPT2ModelPipe(nn.Module):
    def __init__(self, vocab=64, hidden=16):
        super().__init__()
        self.word_embeddings = nn.Embedding(vocab, hidden)
        self.mlp = nn.Sequential(nn.Linear(hidden, 32), nn.GELU(), nn.Linear(32, hidden))
        self.norm = nn.LayerNorm(hidden)
        self.final_linear = nn.Linear(hidden, vocab, bias=False)

    def forward(self, tokens):
        x = self.word_embeddings(tokens)
        return self.final_linear(self.norm(x + self.mlp(x)))


def vocab_parallel_cross_entropy(logits, target):
    return F.cross_entropy(logits.view(-1, logits.size(-1)), target.view(-1), reduction="none").view_as(target)


def cross_entropy(output, labels, _fp16=False):
    labels, loss_mask = labels[0], labels[1]
    if _fp16:
        assert output.dtype == torch.half and loss_mask.dtype == torch.half
        losses = vocab_parallel_cross_entropy(output.contiguous(), labels)
    else:
        losses = vocab_parallel_cross_entropy(output.float().contiguous(), labels)
    loss_mask = loss_mask.view(-1)
    loss = torch.sum(losses.view(-1) * loss_mask) / loss_mask.sum()
    return loss


def get_batch(text, label):
    tokens = text[:, :-1].contiguous()
    labels = text[:, 1:].contiguous()
    loss_mask = (label[:, 1:] >= 0).float()
    return tokens, labels, loss_mask


def build():
    torch.manual_seed(2)
    model = GPT2ModelPipe()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.95))
    data = []
    for answer_starts in ([5, 9], [17, 17], [3, 12]):
        text = torch.randint(0, 64, (2, 17))
        label = text.clone()
        for row, start in enumerate(answer_starts):
            label[row, :start] = -100
        data.append((text, label))
    return SimpleNamespace(model=model, optimizer=optimizer, data=data)


def run(s=None):
    s = s or build()
    gas = len(s.data)
    s.optimizer.zero_grad()
    total = 0.0
    for text, label in s.data:
        tokens, labels, loss_mask = get_batch(text, label)
        loss = cross_entropy(s.model(tokens), (labels, loss_mask))
        (loss / gas).backward()
        total = total + loss.detach() / gas
    torch.nn.utils.clip_grad_norm_(s.model.parameters(), 1.0)
    s.optimizer.step()
    return total


if __name__ == "__main__":
    print(run())
