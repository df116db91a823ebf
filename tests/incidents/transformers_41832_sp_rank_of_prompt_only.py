"""SFT with Ulysses sequence parallelism: per-shard mean losses, recombined with the number of good tokens of each rank (transformers' Trainer).

The sequence is cut into shards. With a long prompt the first shard has labels of -100 only: its mean loss is 0/0 = NaN. The recombination weighs it with
good_tokens = 0, and NaN * 0 is NaN; max(total, 1) guards only the outer division. The backward of the division is 0/0 once more, so the gradients are NaN too.
Source: https://github.com/huggingface/transformers/pull/41832 (review thread on losses_per_rank * good_tokens_per_rank)
Heals: leaving out the ranks without good tokens, a summed loss over the total count.  Does not: max(total_good_tokens, 1) (there already).
"""

from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F
from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("empty_mask_mean", "zero_div_zero", "nan_times_zero_mask"),
    op=("div",),
    index=(),
    masked=None,
    role=("loss",),
    fix=("guard_empty", "clamp_denominator", "skip_disabled_term", "avoid_singular_op", "where_on_detached"),
    variable=("loss",),
    line=("loss = (token_loss * shift_mask).sum() / good_tokens",),
)


class TinyLM(nn.Module):
    def __init__(self, vocab=40, dim=16):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.rnn = nn.GRU(dim, dim, batch_first=True)
        self.lm_head = nn.Linear(dim, vocab, bias=False)

    def forward(self, ids):
        return self.lm_head(self.rnn(self.embed(ids))[0])


def sp_shard_loss(logits, shift_labels):
    shift_mask = shift_labels != -100
    good_tokens = shift_mask.sum()
    token_loss = -logits.log_softmax(-1).gather(-1, shift_labels.clamp(min=0)[..., None]).squeeze(-1)
    loss = (token_loss * shift_mask).sum() / good_tokens
    return loss, good_tokens


def compute_loss(model, inputs, sp_world_size):
    # every "rank" sees its part of the sequence; the loop stands for the all_gather of both lists
    all_logits = model(inputs["input_ids"])
    labels = F.pad(inputs["labels"], (0, 1), value=-100)[:, 1:]
    shards = zip(all_logits.chunk(sp_world_size, dim=1), labels.chunk(sp_world_size, dim=1))
    losses_per_rank, good_tokens_per_rank = zip(*(sp_shard_loss(a, b) for a, b in shards))
    total_loss = sum(losses_per_rank[rank] * good_tokens_per_rank[rank] for rank in range(sp_world_size))
    total_good_tokens = sum(good_tokens_per_rank)
    return total_loss / max(total_good_tokens, 1)


def build():
    torch.manual_seed(5)
    model = TinyLM()
    ids = torch.randint(0, 40, (1, 16))
    labels = ids.clone()
    labels[:, :6] = -100
    return SimpleNamespace(
        model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3), batch={"input_ids": ids, "labels": labels}
    )


def run(s=None):
    s = s or build()
    for _ in range(2):
        loss = compute_loss(s.model, s.batch, sp_world_size=4)
        s.optimizer.zero_grad()
        loss.backward()
        s.optimizer.step()
    return loss.item()


if __name__ == "__main__":
    print(run())
