"""Megatron-LM #205 - gradients of the micro-batches are accumulated in an fp16 buffer (no --accumulate-allreduce-grads-in-fp32).

Loss scale 2 ** 16 keeps the gradient of each micro-batch below 65504, their running sum in half precision is not: the bias of a token that
is the label nearly everywhere passes 65504 at the second micro-batch and is inf. Clipping by the global norm (inf) turns it into NaN and
sets all the other gradients to 0; the step writes NaN into the weights.
Source: https://github.com/NVIDIA/Megatron-LM/issues/205.
Heals: an fp32 buffer, or what the dynamic loss scaler does (skip the step, halve the scale), or a scale that leaves room for the number of
micro-batches. Does not: clipping, and not dividing the finished sum by the number of micro-batches.
"""

from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F

from expected import Expected

EXPECTED = Expected(
    phase=("backward", "optimizer"),
    cause=("fp16_overflow",),
    op=("add_", "add"),
    index=(2,),
    masked=None,
    role=("grad",),
    fix=("upcast_fp32", "skip_bad_step", "validate_config", "fix_upstream"),
    variable=("main_grad",),
    line=("main_grad.add_(param.grad)",),
)


class Float16Module(nn.Module):
    def __init__(self, vocab=16, dim=16):
        super().__init__()
        self.word_embeddings = nn.Embedding(vocab, dim)
        self.dense = nn.Linear(dim, dim)
        self.output_layer = nn.Linear(dim, vocab)
        self.half()

    def forward(self, tokens):
        h = self.word_embeddings(tokens)
        h = h + torch.tanh(self.dense(h))
        return self.output_layer(h).float()


def build():
    torch.manual_seed(205)
    model = Float16Module()
    with torch.no_grad():
        model.word_embeddings.weight.mul_(0.3)
    main_params = [p.detach().clone().float().requires_grad_() for p in model.parameters()]
    main_grads = [torch.zeros_like(p) for p in model.parameters()]
    optimizer = torch.optim.AdamW(main_params, lr=1e-4)
    micro_batches = []
    for _ in range(4):
        tokens = torch.randint(0, 16, (4, 8))
        labels = torch.where(torch.rand(4, 8) < 0.8, torch.full((4, 8), 2), torch.randint(0, 16, (4, 8)))
        micro_batches.append((tokens, labels))
    return SimpleNamespace(
        model=model,
        main_params=main_params,
        main_grads=main_grads,
        optimizer=optimizer,
        micro_batches=micro_batches,
        loss_scale=2.0**16,
        clip_grad=1.0,
    )


def accumulate(s):
    for param, main_grad in zip(s.model.parameters(), s.main_grads):
        main_grad.add_(param.grad)
        param.grad = None


def step(s):
    for main_param, main_grad in zip(s.main_params, s.main_grads):
        main_param.grad = main_grad.float() / (s.loss_scale * len(s.micro_batches))
    total_norm = torch.stack([p.grad.norm() for p in s.main_params]).norm()
    clip_coeff = s.clip_grad / (total_norm + 1e-6)
    if not clip_coeff >= 1.0:
        for main_param in s.main_params:
            main_param.grad.mul_(clip_coeff)
    s.optimizer.step()
    with torch.no_grad():
        for param, main_param in zip(s.model.parameters(), s.main_params):
            param.copy_(main_param)


def run(s=None):
    s = s or build()
    total = 0.0
    for tokens, labels in s.micro_batches:
        output = s.model(tokens)
        loss = F.cross_entropy(output.flatten(0, 1), labels.flatten())
        (loss * s.loss_scale).backward()
        accumulate(s)
        total = total + loss.detach() / len(s.micro_batches)
    step(s)
    return total
