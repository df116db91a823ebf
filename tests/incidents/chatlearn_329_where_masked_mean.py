"""GRPO loss whose masked mean selects the valid tokens with torch.where before it sums.

The old log-probs are padded with -100 (as labels are), so the ratio of padding overflows to inf. torch.where drops it and the
loss is fine, but backward still visits the exp: 0 * inf = NaN for the padding and thereby for every shared weight.
Source: https://github.com/alibaba/ChatLearn/pull/329 (loss_masked_mean, calculate_grpo_loss)
Heals: masking the log ratio before exp; bounding it; a harmless padding value.
Does not: another torch.where or nan_to_num on the loss; the 1e-8; clipping the ratio after exp.
"""

from types import SimpleNamespace

import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence

from expected import Expected

EXPECTED = Expected(
    phase=("backward",),
    cause=("where_grad_trap",),
    op=("exp",),
    index=(0, 5),
    masked=True,
    role=("ratio", "is_weight"),
    fix=("mask_before_op", "clamp_exponent", "where_on_detached", "fix_upstream", "clamp_input"),
    variable=("ratio",),
    line=("ratio = torch.exp(logprobs_diff)",),
)

PAD = -100.0


def loss_masked_mean(values, loss_mask, axis=None):
    valid_values = torch.where(loss_mask.bool(), values, 0.0)
    return (valid_values * loss_mask).sum(axis) / (loss_mask.sum(axis) + 1e-8)


def calculate_grpo_loss(log_probs, old_logprobs, advantages, loss_mask, neg_clip_ratio=0.2, pos_clip_ratio=0.2):
    logprobs_diff = log_probs - old_logprobs
    ratio = torch.exp(logprobs_diff)
    pg_loss = -advantages.unsqueeze(-1) * ratio
    pg_loss_clipped = -advantages.unsqueeze(-1) * torch.clamp(ratio, 1.0 - neg_clip_ratio, 1.0 + pos_clip_ratio)
    pg_loss_upperbound = torch.ones_like(pg_loss) * 10.0
    pg_loss = torch.min(torch.max(pg_loss, pg_loss_clipped), pg_loss_upperbound)
    return loss_masked_mean(pg_loss, loss_mask)


class PolicyModel(nn.Module):
    def __init__(self, vocab=25, dim=12):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.rnn = nn.GRU(dim, dim, batch_first=True)
        self.head = nn.Linear(dim, vocab)

    def forward(self, all_tokens):
        logits = self.head(self.rnn(self.embed(all_tokens[:, :-1]))[0])
        return torch.log_softmax(logits, -1).gather(-1, all_tokens[:, 1:, None]).squeeze(-1)


def build():
    torch.manual_seed(23)
    model = PolicyModel()
    rollouts = [torch.randint(1, 25, (n,)) for n in (6, 9, 7, 9)]
    all_tokens = pad_sequence(rollouts, batch_first=True)
    loss_mask = pad_sequence([torch.ones(len(r) - 1) for r in rollouts], batch_first=True)
    loss_mask[:, 0] = 0
    with torch.no_grad():
        logprobs = model(all_tokens)
    old_logprobs = pad_sequence([logprobs[i, : len(r) - 1] for i, r in enumerate(rollouts)], batch_first=True, padding_value=PAD)
    batch = dict(all_tokens=all_tokens, loss_mask=loss_mask, old_logprobs=old_logprobs, advantages=torch.tensor([1.0, -1.0, -0.3, 0.3]))
    return SimpleNamespace(model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3), batch=batch)


def run(s=None):
    s = s or build()
    b = s.batch
    losses = []
    for _ in range(2):
        loss = calculate_grpo_loss(s.model(b["all_tokens"]), b["old_logprobs"], b["advantages"], b["loss_mask"])
        s.optimizer.zero_grad()
        loss.backward()
        s.optimizer.step()
        losses.append(loss.item())
    return losses, s.model.head.weight.isfinite().all().item()


if __name__ == "__main__":
    print(run())
