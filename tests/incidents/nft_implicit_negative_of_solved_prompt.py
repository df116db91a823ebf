"""Negative-aware fine-tuning: wrong answers train the implicit negative policy (1 - p * ratio) / (1 - p), p being the prompt's correct rate. For a
prompt that every sample solved p is 1 and the quotient is x / 0. torch.where takes the positive loss there, so the loss is finite, but the gradient
of the rejected branch is 0 / 0.

Source: https://github.com/NVlabs/NFT dp_actor.py, the token-level NFT loss (which clamps the correct rate to [0.02, 0.98] first).
Heals: that clamp, a denominator of 1 for right answers before the division, or leaving solved prompts out. nan_to_num on the losses does not.
"""

from types import SimpleNamespace

import torch
import torch.nn as nn

from expected import Expected

EXPECTED = Expected(
    phase=("backward",),
    cause=("where_grad_trap", "zero_denominator"),
    op=("div",),
    index=(4, 0),
    masked=True,
    role=("ratio",),
    fix=("clamp_denominator", "clamp_input", "mask_before_op", "where_on_detached", "drop_invalid_sample", "avoid_singular_op"),
    variable=("proxy",),
    line=("proxy = (1.0 - correct_rate * ratio) / norm",),
)


class Actor(nn.Module):
    def __init__(self, vocab=18, dim=8):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 2 * dim), nn.SiLU(), nn.Linear(2 * dim, dim))
        self.lm_head = nn.Linear(dim, vocab)

    def forward(self, input_ids):
        hidden = self.embed(input_ids)
        return self.lm_head(hidden + self.mlp(hidden))


def response_log_prob(model, input_ids):
    logits = model(input_ids[:, :-1])
    return logits.log_softmax(-1).gather(-1, input_ids[:, 1:, None]).squeeze(-1)


def nft_loss(log_prob, old_log_prob, correct, correct_rate, response_mask, clamp_negative=0.1):
    ratio = torch.exp((log_prob - old_log_prob).clamp(max=10.0))
    correct_rate = correct_rate[:, None]
    norm = 1.0 - correct_rate
    proxy = (1.0 - correct_rate * ratio) / norm
    negative_loss = -torch.log(proxy.clamp(min=clamp_negative))
    positive_loss = -torch.log(ratio)
    pg_losses = torch.where(correct[:, None], positive_loss, negative_loss)
    return (pg_losses * response_mask).sum() / response_mask.sum()


def build():
    torch.manual_seed(77)
    model = Actor()
    input_ids = torch.randint(0, 18, (8, 7))
    correct = torch.tensor([True, False, False, True, True, True, True, True])
    correct_rate = correct.float().view(2, 4).mean(1).repeat_interleave(4)
    response_mask = torch.ones(8, 6)
    response_mask[1, 4:] = 0
    response_mask[6, 5:] = 0
    with torch.no_grad():
        # the rollout policy is one update older
        old_log_prob = response_log_prob(model, input_ids) + 0.05 * torch.rand(8, 6) + 0.01
    return SimpleNamespace(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-4),
        input_ids=input_ids,
        correct=correct,
        correct_rate=correct_rate,
        old_log_prob=old_log_prob,
        response_mask=response_mask,
    )


def run(s=None):
    s = s or build()
    log_prob = response_log_prob(s.model, s.input_ids)
    loss = nft_loss(log_prob, s.old_log_prob, s.correct, s.correct_rate, s.response_mask)
    s.optimizer.zero_grad()
    loss.backward()
    s.optimizer.step()
    return loss


if __name__ == "__main__":
    print("loss", run().item())
