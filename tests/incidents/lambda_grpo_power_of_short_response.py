"""grpo-composer, lambda-GRPO length weights
(https://github.com/Wodlfvllf/grpo-composer/blob/main/grpo_composer/core/aggregation/group_learnable.py, GroupLearnableAggregation).

Responses are weighted by softmax(h ** lambda) with h = 1 + r * z and z the standardised length. A response much shorter than its group has
z below -1, so h is negative, and a negative number to the power 0.5 is NaN; the softmax spreads it over the group and the sum over the loss.
Clamping h at a small positive value heals it; so does an exponent for which the power exists. A larger epsilon beside the standard deviation
does not (it is far from 0), nor does nan_to_num of the loss: the NaN weights still multiply the gradient.
"""

from types import SimpleNamespace

import torch
import torch.nn as nn

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("sqrt_negative",),
    op=("pow",),
    index=(1, 2),
    masked=False,
    role=("is_weight", "loss", "advantages"),
    fix=("clamp_input", "stable_function", "validate_config", "avoid_singular_op", "drop_invalid_sample"),
    variable=(None,),
    line=("f_lambda = G * torch.softmax(h**s.lambda_, dim=-1)",),
)


class Policy(nn.Module):
    def __init__(self, vocab=18, hidden=10):
        super().__init__()
        self.wte = nn.Embedding(vocab, hidden)
        self.mlp = nn.Sequential(nn.Linear(hidden, 2 * hidden), nn.GELU(), nn.Linear(2 * hidden, hidden))
        self.lm_head = nn.Linear(hidden, vocab, bias=False)

    def forward(self, input_ids):
        hidden = self.wte(input_ids)
        return self.lm_head(hidden + self.mlp(hidden))


def standard_advantage(rewards, eps=1e-8):
    return (rewards - rewards.mean(-1, keepdim=True)) / (rewards.std(-1, keepdim=True) + eps)


def completion_logps(model, input_ids):
    return model(input_ids[..., :-1]).log_softmax(-1).gather(-1, input_ids[..., 1:, None]).squeeze(-1)


def build():
    torch.manual_seed(507)
    model = Policy()
    B, G, T = 2, 6, 24
    input_ids = torch.randint(0, 18, (B, G, T + 1))
    lengths = torch.tensor([[20, 20, 24, 20, 20, 23], [22, 24, 2, 23, 21, 24]])
    mask = (torch.arange(T) < lengths.unsqueeze(-1)).float()
    rewards = torch.tensor([[0.0, 1.0, 0.0, 1.0, 1.0, 0.0], [1.0, 1.0, 0.0, 0.0, 1.0, 0.0]])
    with torch.no_grad():
        old_log_probs = completion_logps(model, input_ids)
    return SimpleNamespace(
        model=model,
        input_ids=input_ids,
        mask=mask,
        rewards=rewards,
        old_log_probs=old_log_probs,
        lambda_=0.5,
        r=1.0,
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-5),
    )


def run(s=None):
    s = s or build()
    G = s.mask.shape[1]
    advantage = standard_advantage(s.rewards).unsqueeze(-1)
    log_probs = completion_logps(s.model, s.input_ids)
    ratio = torch.exp(log_probs - s.old_log_probs)
    ratio_min = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.28) * advantage)

    seq_lengths = s.mask.sum(dim=-1)
    z = (seq_lengths - seq_lengths.mean(-1, keepdim=True)) / (seq_lengths.std(-1, keepdim=True) + 1e-8)
    h = 1 + s.r * z
    f_lambda = G * torch.softmax(h**s.lambda_, dim=-1)
    weighted_loss = f_lambda.unsqueeze(-1) * ratio_min * s.mask
    loss = -weighted_loss.sum() / s.mask.sum()

    s.optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(s.model.parameters(), 1.0)
    s.optimizer.step()
    return loss


if __name__ == "__main__":
    run()
