"""PRO (DAMO-ConvAI): the ranking loss exponentiates score * (reward gap); candidates that are not sorted by reward give a negative gap.

Source: https://github.com/AlibabaResearch/DAMO-ConvAI/tree/main/PRO (train/utils/process_manager.py, compute_loss). Scores are mean log-probs
(negative), gaps are meant to be positive, so every exponent is negative. Here the candidates come in generation order with raw rewards:
one gap is about -36, the exponent is > 88, exp gives inf and the loss is inf.
Heals: logsumexp, a bounded exponent or gap, sorting by reward before the loss, dropping the unsorted row. Tempting and useless: a bigger eps
in the log, which guards the other end; clamping the sum after exp.
"""

from types import SimpleNamespace

import torch
import torch.nn as nn

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("exp_overflow",),
    op=("exp",),
    index=(1, 1),
    masked=None,
    role=("logits", "loss", "ratio", "is_weight", "log_probs", "rewards"),
    fix=("stable_function", "clamp_exponent", "fix_upstream", "clamp_input", "reject_input", "drop_invalid_sample"),
    variable=(None,),
    line=("neg_sum = torch.sum(torch.exp(scores[:, time + 1 :] * neg_temperatures), dim=1)",),
)


class Policy(nn.Module):
    def __init__(self, vocab=30, dim=12):
        super().__init__()
        self.wte = nn.Embedding(vocab, dim)
        self.h = nn.Linear(dim, dim)
        self.lm_head = nn.Linear(dim, vocab, bias=False)

    def forward(self, ids):
        x = self.wte(ids)
        return self.lm_head(x + torch.relu(self.h(x)))


def sequence_scores(model, input_ids, prefix_mask):
    """[batch, stage, len] -> sum and mean log-prob of every candidate."""
    logits = model(input_ids[:, :, :-1])
    logps = logits.log_softmax(-1).gather(-1, input_ids[:, :, 1:].unsqueeze(-1)).squeeze(-1)
    suffix_mask = 1 - prefix_mask[:, :, 1:]
    sum_scores = (logps * suffix_mask).sum(-1)
    return sum_scores, sum_scores / suffix_mask.sum(-1)


def compute_loss(model, batch, sft_weight=0.05):
    sum_scores, scores = sequence_scores(model, batch["input_ids"], batch["prefix_mask"])
    training_stage = scores.shape[1]
    eps = 1e-10
    total_loss = 0
    for time in range(training_stage - 1):
        neg_reward = batch["rewards"][:, time + 1 :]
        pos_reward = batch["rewards"][:, time]
        neg_temperatures = pos_reward.view(-1, 1) - neg_reward
        pos_temperature = torch.max(neg_temperatures, dim=1).values
        pos_logit = scores[:, time] * pos_temperature
        neg_sum = torch.sum(torch.exp(scores[:, time + 1 :] * neg_temperatures), dim=1)
        loss = torch.log(eps + torch.exp(pos_logit) + neg_sum) - pos_logit
        total_loss = total_loss + loss.mean()
    sft_loss = -sum_scores[:, 0].mean()
    return total_loss + sft_weight * sft_loss


def build():
    torch.manual_seed(23)
    model = Policy()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-6)
    input_ids = torch.randint(1, 30, (3, 3, 9))
    prefix_mask = torch.zeros(3, 3, 9)
    prefix_mask[:, :, :3] = 1
    rewards = torch.tensor(
        [
            [2.1, 0.4, -0.9],
            [-14.5, -15.0, 21.5],  # raw scores, in the order of generation
            [1.7, 1.2, 0.3],
        ]
    )
    return SimpleNamespace(model=model, optimizer=optimizer, batch=dict(input_ids=input_ids, prefix_mask=prefix_mask, rewards=rewards))


def run(s=None):
    s = s or build()
    loss = compute_loss(s.model, s.batch)
    s.optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(s.model.parameters(), 1.0)
    s.optimizer.step()
    return loss
