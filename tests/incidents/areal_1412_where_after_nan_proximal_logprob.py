"""AReaL #1412 (review of the CISPO surrogate) - masked tokens are removed by torch.where after the product, not before it.

The tool tokens of a trajectory have no proximal log-prob; the rollout stores NaN there. The detached ratio becomes NaN, torch.where removes
the product from the loss, and backward computes 0 * NaN for these tokens' log-probs: the loss is finite, every gradient is NaN.
Source: https://github.com/areal-project/AReaL/pull/1412 . Heals: fill the masked log-probs before the subtraction (or the ratio before
the product). Does not: the torch.where at the end, nan_to_num on the loss.
"""

from types import SimpleNamespace

import torch
import torch.nn as nn
from expected import Expected

EXPECTED = Expected(
    phase=("backward", "input"),
    cause=("where_grad_trap", "nan_times_zero_mask", "bad_input"),
    op=("sub", "input", "where", "index_put", "mul", "fill_"),
    index=(1, 3),
    masked=True,
    role=("old_log_probs", "log_ratio", "ratio", "rollout_log_probs"),
    fix=("mask_before_op", "where_on_detached", "clamp_input", "reject_input", "fix_upstream", "finite_mask_fill"),
    variable=("proximal_logprobs", "log_ratio", "proximal"),
    line=("log_ratio = (logprobs - proximal_logprobs).detach()", 'proximal[1, 3:5] = float("nan")'),
)


class Policy(nn.Module):
    def __init__(self, vocab=18, dim=12):
        super().__init__()
        self.wte = nn.Embedding(vocab, dim)
        self.rnn = nn.GRU(dim, dim, batch_first=True)
        self.head = nn.Linear(dim, vocab)

    def forward(self, ids):
        return self.head(self.rnn(self.wte(ids))[0])


def gather_logprobs(logits, labels):
    return logits.log_softmax(-1).gather(-1, labels.unsqueeze(-1)).squeeze(-1)


def cispo_loss_fn(logprobs, proximal_logprobs, advantages, loss_mask, eps_clip=0.2, eps_clip_higher=0.28):
    loss_mask_count = loss_mask.count_nonzero() or 1
    log_ratio = (logprobs - proximal_logprobs).detach()
    ratio = torch.exp(log_ratio)
    ratio_clipped = torch.clamp(ratio, 1.0 - eps_clip, 1.0 + eps_clip_higher)
    pg_loss = -ratio_clipped * advantages * logprobs
    return torch.where(loss_mask, pg_loss, 0).sum() / loss_mask_count


def build():
    torch.manual_seed(33)
    model = Policy()
    ids = torch.randint(0, 18, (3, 9))
    loss_mask = torch.ones(3, 8, dtype=torch.bool)
    loss_mask[:, :2] = False  # prompt
    loss_mask[1, 3:5] = False  # tool output
    with torch.no_grad():
        proximal = gather_logprobs(model(ids[:, :-1]), ids[:, 1:]) + 0.05 * torch.randn(3, 8)
    proximal[1, 3:5] = float("nan")
    batch = {
        "input_ids": ids,
        "loss_mask": loss_mask,
        "proximal_logprobs": proximal,
        "advantages": torch.tensor([[0.9], [-0.4], [-0.5]]).expand(3, 8),
    }
    return SimpleNamespace(model=model, batch=batch, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3))


def run(s=None):
    s = s or build()
    ids = s.batch["input_ids"]
    logprobs = gather_logprobs(s.model(ids[:, :-1]), ids[:, 1:])
    loss = cispo_loss_fn(logprobs, s.batch["proximal_logprobs"], s.batch["advantages"], s.batch["loss_mask"])
    s.optimizer.zero_grad()
    loss.backward()
    s.optimizer.step()
    return loss


if __name__ == "__main__":
    print(run())
