"""TRL's `dft_loss` (dynamic fine-tuning) on a batch whose completions were all cut off by max_length.

completion_only_loss leaves labels only in the completion; the prompts are longer than max_length, so every label is -100. The sum over the
mask is 0, so is the count that it is divided by: 0 / 0. Its gradient is 0 * inf = NaN for every parameter.

Source: https://github.com/huggingface/trl/pull/6671 ("Guards DFT loss against 0/0"), https://github.com/huggingface/trl/issues/6668.
Heals: a denominator of at least 1, skipping the empty batch, dropping such samples in the collator. Does not: gradient clipping, nan_to_num of the
loss (its backward gives 0 into 0 * inf).
"""

from types import SimpleNamespace

import torch
from torch import nn

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("zero_div_zero", "empty_mask_mean"),
    op=("div",),
    index=(),
    masked=None,
    role=("loss",),
    fix=("guard_empty", "clamp_denominator", "drop_invalid_sample", "representable_eps"),
    variable=("loss",),
    line=("loss = (per_token_loss * loss_mask).sum() / num_items_in_batch",),
)


def selective_log_softmax(logits, index):
    return torch.gather(logits.log_softmax(-1), dim=-1, index=index.unsqueeze(-1)).squeeze(-1)


def dft_loss(outputs, labels, num_items_in_batch=None):
    labels = nn.functional.pad(labels, (0, 1), value=-100)
    shift_labels = labels[..., 1:].contiguous()
    loss_mask = shift_labels != -100
    shift_labels[~loss_mask] = 0
    logprobs = selective_log_softmax(outputs.logits, shift_labels)
    per_token_loss = -logprobs.exp().detach() * logprobs
    if num_items_in_batch is None:
        num_items_in_batch = loss_mask.sum()
    loss = (per_token_loss * loss_mask).sum() / num_items_in_batch
    return loss


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(30, 12)
        self.head = nn.Linear(12, 30)

    def forward(self, input_ids):
        return SimpleNamespace(logits=self.head(torch.tanh(self.embed(input_ids))))


def collate(examples, max_length):
    ids = [(e["prompt"] + e["completion"])[:max_length] for e in examples]
    labels = [([-100] * len(e["prompt"]) + e["completion"])[:max_length] for e in examples]
    width = max(map(len, ids))
    return {
        "input_ids": torch.tensor([x + [0] * (width - len(x)) for x in ids]),
        "labels": torch.tensor([x + [-100] * (width - len(x)) for x in labels]),
    }


def build():
    torch.manual_seed(8)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    data = [{"prompt": torch.randint(1, 30, (n,)).tolist(), "completion": torch.randint(1, 30, (3,)).tolist()} for n in (6, 7, 9, 11)]
    batches = [collate(data[:2], max_length=8), collate(data[2:], max_length=8)]
    return SimpleNamespace(model=model, optimizer=optimizer, batch=batches)


def run(s=None):
    s = s or build()
    for batch in s.batch:
        loss = dft_loss(s.model(batch["input_ids"]), batch["labels"])
        s.optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(s.model.parameters(), 1.0)
        s.optimizer.step()
    return loss.item()


if __name__ == "__main__":
    print(run())
