"""Fine-tuning with label smoothing: the vocabulary cross entropy takes the log of a softmax that has underflowed.

The plain loss is the stable log(sum exp) - logit. For the smoothing term the function divides exp(logits - max) by its sum and takes the log of it
again. A response token whose logits are spread over more than about 104 has probabilities that are exactly 0 in fp32: log gives -inf, the mean over
the vocabulary is -inf and the loss +inf; the backward pass of exp multiplies 0 * inf.
Source: https://github.com/NVIDIA/Megatron-LM/pull/7466 (megatron/core/tensor_parallel/cross_entropy.py, label_smoothing > 0), one rank, plain autograd
Heals: mean log-probability from log_softmax; a floor under the probability. Does not: masking prompt tokens, a smaller loss weight, skipping the step (the token stays).
"""

from types import SimpleNamespace

import torch
from torch import nn

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("log_zero",),
    op=("log",),
    index=(1, 3, 5),
    masked=False,
    role=("log_probs", "loss"),
    fix=("stable_function", "clamp_input", "clamp_exponent"),
    variable=("log_probs",),
    line=("log_probs = torch.log(exp_logits)",),
)


def vocab_cross_entropy(vocab_logits, target, label_smoothing=0.0):
    logits_max = vocab_logits.max(dim=-1, keepdim=True).values.detach()
    vocab_logits = vocab_logits - logits_max
    predicted_logits = vocab_logits.gather(-1, target.unsqueeze(-1)).squeeze(-1)
    exp_logits = vocab_logits.exp()
    sum_exp_logits = exp_logits.sum(dim=-1)
    loss = torch.log(sum_exp_logits) - predicted_logits
    if label_smoothing > 0:
        vocab_size = exp_logits.size(-1)
        smoothing = label_smoothing * vocab_size / (vocab_size - 1)
        exp_logits = exp_logits / sum_exp_logits.unsqueeze(-1)
        log_probs = torch.log(exp_logits)
        mean_log_probs = log_probs.mean(dim=-1)
        loss = (1.0 - smoothing) * loss - smoothing * mean_log_probs
    return loss


def build():
    torch.manual_seed(1)
    vocab, hidden = 12, 8
    model = nn.Sequential(nn.Embedding(vocab, hidden), nn.Linear(hidden, vocab, bias=False))
    with torch.no_grad():
        # a well trained direction: token 7 is answered with certainty, and one suppressed word lies far below
        model[0].weight[7] = 0.0
        model[0].weight[7, 0] = 10.0
        model[1].weight[:, 0] *= 0.5
        model[1].weight[4, 0] = 6.0
        model[1].weight[5, 0] = -5.5
    tokens = torch.tensor([[1, 2, 3, 0, 8], [9, 1, 2, 7, 6], [3, 2, 0, 1, 10]])
    labels = torch.tensor([[2, 3, 0, 8, 11], [1, 2, 7, 4, 11], [2, 0, 1, 10, 11]])
    loss_mask = torch.tensor([[0, 0, 1, 1, 1], [0, 0, 1, 1, 1], [0, 1, 1, 1, 1]]).float()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return SimpleNamespace(model=model, optimizer=optimizer, batch={"tokens": tokens, "labels": labels, "loss_mask": loss_mask})


def run(s=None):
    s = s or build()
    out = []
    for _ in range(2):
        b = s.batch
        losses = vocab_cross_entropy(s.model(b["tokens"]), b["labels"], label_smoothing=0.1)
        loss = (losses * b["loss_mask"]).sum() / b["loss_mask"].sum()
        s.optimizer.zero_grad()
        loss.backward()
        s.optimizer.step()
        out.append(loss.item())
    return out


if __name__ == "__main__":
    print(run())
