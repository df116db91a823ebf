"""Relax #285: a micro-batch without a loss token keeps its graph through 0 * loss; its aborted responses were never scored.

Source: https://github.com/redai-studio/Relax/pull/285 (zero-token no-signal steps of the shared Megatron trainer). The zero connection is meant to give
a gradient of exactly 0. The loader fills the old log-probs of an unscored response with -100, the ignore value of labels; the ratio
overflows there, 0 * inf = NaN, and one all-masked micro-batch ruins the accumulated gradient of the step.
Heals: masking or bounding the log ratio, connecting over the logits instead, leaving the micro-batch out, filling with 0. Tempting and
useless: nan_to_num of the loss, pg_loss.mean() in place of the sum.
"""

from types import SimpleNamespace

import torch
import torch.nn as nn

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("inf_times_zero_coef", "inf_times_zero_mask"),
    op=("exp",),
    index=(0, 0),
    masked=True,
    role=("ratio",),
    fix=(
        "mask_before_op",
        "skip_disabled_term",
        "clamp_exponent",
        "guard_empty",
        "drop_invalid_sample",
        "fix_upstream",
        "clamp_input",
        "reject_input",
    ),
    variable=("ratio",),
    line=("ratio = log_ratio.exp()",),
)


class GPTModel(nn.Module):
    def __init__(self, vocab=27, dim=16):
        super().__init__()
        self.word_embeddings = nn.Embedding(vocab, dim)
        self.dense = nn.Linear(dim, dim)
        self.output_layer = nn.Linear(dim, vocab, bias=False)

    def forward(self, tokens):
        hidden = self.word_embeddings(tokens)
        hidden = hidden + torch.tanh(self.dense(hidden))
        return self.output_layer(hidden)


def policy_loss_function(logits, micro_batch):
    num_tokens = micro_batch["loss_mask"].sum()
    log_probs = logits.log_softmax(-1).gather(-1, micro_batch["labels"].unsqueeze(-1)).squeeze(-1)
    log_ratio = log_probs - micro_batch["old_log_probs"]
    ratio = log_ratio.exp()
    advantages = micro_batch["advantages"].unsqueeze(-1)
    pg_loss = torch.max(-advantages * ratio, -advantages * ratio.clamp(0.8, 1.28))
    if num_tokens == 0:
        loss = 0 * pg_loss.sum()  # every rank must take part in the backward of this micro-batch
    else:
        loss = (pg_loss * micro_batch["loss_mask"]).sum()
    return loss, num_tokens


def build():
    torch.manual_seed(285)
    model = GPTModel()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6)
    micro_batches = []
    for response_lengths in ([5, 3], [0, 0], [4, 6]):
        tokens = torch.randint(0, 27, (2, 9))
        loss_mask = torch.zeros(2, 8)
        for row, length in enumerate(response_lengths):
            loss_mask[row, 2 : 2 + length] = 1
        labels = tokens[:, 1:]
        with torch.no_grad():
            old = model(tokens[:, :-1]).log_softmax(-1).gather(-1, labels.unsqueeze(-1)).squeeze(-1)
        for row, length in enumerate(response_lengths):
            if length == 0:
                old[row] = -100.0  # aborted before the first token: nothing was scored
        micro_batches.append(
            dict(tokens=tokens[:, :-1], labels=labels, loss_mask=loss_mask, old_log_probs=old, advantages=torch.tensor([0.9, -0.9]))
        )
    return SimpleNamespace(model=model, optimizer=optimizer, micro_batches=micro_batches)


def run(s=None):
    s = s or build()
    total_tokens = sum(m["loss_mask"].sum() for m in s.micro_batches)
    s.optimizer.zero_grad()
    s.losses = []
    for micro_batch in s.micro_batches:
        logits = s.model(micro_batch["tokens"])
        loss, _ = policy_loss_function(logits, micro_batch)
        loss = loss / total_tokens
        loss.backward()
        s.losses.append(loss.detach())
    nn.utils.clip_grad_norm_(s.model.parameters(), 1.0)
    s.optimizer.step()
    return sum(s.losses)
