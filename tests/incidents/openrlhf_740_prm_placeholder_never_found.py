"""OpenRLHF issues #740 and #509 (https://github.com/OpenRLHF/OpenRLHF/issues/740): the loss of the process reward model is NaN.

PRMLoss keeps the positions whose input token is the placeholder. Here the tokenizer merged " $$" with the text before it, so the id that was looked
up occurs nowhere: the selection is empty and cross_entropy's mean over nothing is NaN, and the running mean of the loss stays NaN ever after
(the gradients of this micro-batch are zeros). A placeholder that is a token of its own, or skipping batches without steps, heals it. ignore_index
and clamping the logits do not: nothing is there to be ignored.
"""

from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("empty_mask_mean", "zero_div_zero"),
    op=("cross_entropy", "nll_loss", "cross_entropy_loss", "nll_loss_forward"),
    index=(),
    masked=None,
    role=("loss",),
    fix=("guard_empty", "fix_upstream", "skip_bad_step", "drop_invalid_sample", "reject_input", "validate_config"),
    variable=("loss", "prm_loss", None),
    line=("loss = F.cross_entropy(logits, labels, ignore_index=IGNORE_INDEX)",),
)

IGNORE_INDEX = -100


class RewardLM(nn.Module):
    def __init__(self, vocab=30, hidden=12):
        super().__init__()
        self.embed_tokens = nn.Embedding(vocab, hidden)
        self.block = nn.Sequential(nn.LayerNorm(hidden), nn.Linear(hidden, hidden), nn.SiLU(), nn.Linear(hidden, hidden))
        self.lm_head = nn.Linear(hidden, vocab, bias=False)

    def forward(self, input_ids):
        hidden = self.embed_tokens(input_ids)
        return self.lm_head(hidden + self.block(hidden))


class PRMLoss(nn.Module):
    def __init__(self, placeholder_token_id, reward_token_ids):
        super().__init__()
        self.placeholder_token_id = placeholder_token_id
        self.reward_token_ids = reward_token_ids

    def forward(self, inputs, logits, labels):
        placeholder_mask = inputs == self.placeholder_token_id
        logits = logits[placeholder_mask]
        labels = labels[placeholder_mask].clone()
        logits = logits[..., self.reward_token_ids]
        for i, token in enumerate(self.reward_token_ids):
            labels = torch.where(labels == token, i, labels)
        loss = F.cross_entropy(logits, labels, ignore_index=IGNORE_INDEX)
        return loss


def build():
    torch.manual_seed(509)
    model = RewardLM()
    plus, minus, placeholder, merged = 10, 12, 25, 27
    input_ids = torch.randint(0, 9, (2, 14))
    labels = torch.full_like(input_ids, IGNORE_INDEX)
    for row, steps in enumerate(([3, 7, 12], [5, 10])):
        input_ids[row, steps] = merged
        labels[row, steps] = torch.tensor([plus, minus, plus][: len(steps)])
    return SimpleNamespace(
        model=model,
        input_ids=input_ids,
        labels=labels,
        loss_fn=PRMLoss(placeholder, [plus, minus]),
        loss_mean=0.7,
        optimizer=torch.optim.Adam(model.parameters(), lr=1e-6),
    )


def run(s=None):
    s = s or build()
    output = s.model(s.input_ids)
    prm_loss = s.loss_fn(s.input_ids, output, s.labels)
    s.optimizer.zero_grad()
    prm_loss.backward()
    s.optimizer.step()
    s.loss_mean = s.loss_mean * 0.9 + 0.1 * prm_loss.item()
    return prm_loss


if __name__ == "__main__":
    run()
