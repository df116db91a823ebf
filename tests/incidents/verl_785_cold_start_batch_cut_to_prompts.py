"""Cold-start SFT before the RL stage: micro-batches, loss mask over the response, right truncation to max_length.

Both prompts of the second micro-batch are longer than max_length, so truncation leaves no response token and the loss mask is all 0. The sum of the loss is
0, the count is 0, the mean is 0/0 = NaN; backward divides by the same 0 and the accumulated gradient of the good micro-batch is NaN too. The model writes "!!!!!!" from here on.

Source: https://github.com/verl-project/verl/issues/785 (fsdp_sft_trainer.py: data truncation leaves a batch without a position in the loss mask).
Heals: max(count, 1) or an epsilon under the division, skipping the micro-batch, dropping such samples.  Does not: fp32, gradient clipping, a lower learning rate.
"""

from types import SimpleNamespace

import torch
import torch.nn as nn

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("empty_mask_mean", "zero_div_zero"),
    op=("div",),
    index=(),
    masked=None,
    role=("loss",),
    fix=("clamp_denominator", "guard_empty", "drop_invalid_sample", "reject_input", "skip_bad_step", "fix_upstream"),
    variable=("loss",),
    line=("loss = torch.sum(loss) / valid_token_this_rank",),
)

MAX_LENGTH = 12
PAD = 0


class Policy(nn.Module):
    def __init__(self, vocab=32, dim=16):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.rnn = nn.GRU(dim, dim, batch_first=True)
        self.lm_head = nn.Linear(dim, vocab, bias=False)

    def forward(self, input_ids):
        return self.lm_head(self.rnn(self.embed(input_ids))[0])


def encode(prompt_len, response_len):
    ids = torch.randint(1, 32, (prompt_len + response_len,))
    mask = torch.zeros(len(ids))
    mask[max(prompt_len - 1, 0) : len(ids) - 1] = 1
    row, row_mask = torch.full((MAX_LENGTH,), PAD), torch.zeros(MAX_LENGTH)
    keep = min(len(ids), MAX_LENGTH)
    row[:keep], row_mask[:keep] = ids[:keep], mask[:keep]
    return row, row_mask


def build():
    torch.manual_seed(785)
    rows = [encode(4, 5), encode(6, 6), encode(15, 4), encode(13, 9)]
    batch = dict(input_ids=torch.stack([r for r, _ in rows]), loss_mask=torch.stack([m for _, m in rows]))
    model = Policy()
    return SimpleNamespace(model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3), batch=batch)


def compute_loss(model, input_ids, loss_mask):
    loss_mask = loss_mask[:, :-1].reshape(-1)
    logits = model(input_ids)[:, :-1]
    loss = nn.functional.cross_entropy(logits.reshape(-1, logits.shape[-1]), input_ids[:, 1:].reshape(-1), reduction="none")
    loss = loss * loss_mask
    valid_token_this_rank = torch.sum(loss_mask)
    loss = torch.sum(loss) / valid_token_this_rank
    return loss


def run(s=None):
    s = s or build()
    s.optimizer.zero_grad()
    step_loss = 0.0
    for input_ids, loss_mask in zip(s.batch["input_ids"].split(2), s.batch["loss_mask"].split(2)):
        loss = compute_loss(s.model, input_ids, loss_mask) / 2
        loss.backward()
        step_loss += loss.item()
    torch.nn.utils.clip_grad_norm_(s.model.parameters(), 1.0)
    s.optimizer.step()
    return step_loss


if __name__ == "__main__":
    print(run())
