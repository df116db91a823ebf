"""TRL's SAPO loss passes the importance ratio through a sigmoid gate instead of a clip, so no ratio is too large for the loss.

The sampler forced the end-of-thinking token of one answer (budget forcing); the policy that sampled gave that token e^-96, the current one
expects it. The ratio overflows to inf in exp, sigmoid(inf) is 1 and the loss is an ordinary number. In backward the gate's slope is 0
and the exp multiplies it by its own result: 0 * inf.

Source: https://github.com/huggingface/trl/blob/main/trl/trainer/grpo_trainer.py (loss_type="sapo", get_sapo_token_loss)
Heals: clamping the log-ratio before exp, as verl's SAPO does, or taking such tokens out of the loss before exp. Does not: clamping the
ratio after exp, nor nan_to_num of the token losses.
"""

from types import SimpleNamespace

import torch
import torch.nn as nn
from expected import Expected

EXPECTED = Expected(
    phase=("backward",),
    cause=("exp_overflow", "where_grad_trap"),
    op=("exp",),
    index=(1, 3),
    masked=False,
    role=("ratio", "is_weight"),
    fix=("clamp_exponent", "mask_before_op", "drop_invalid_sample", "fix_upstream"),
    variable=("coef_1",),
    line=("coef_1 = torch.exp(log_importance_weights)",),
)

PROMPT_LEN = 3
SAPO_TEMPERATURE_POS, SAPO_TEMPERATURE_NEG = 1.0, 1.05


class CausalLM(nn.Module):
    def __init__(self, vocab=24, dim=16):
        super().__init__()
        self.embed_tokens = nn.Embedding(vocab, dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 32), nn.GELU(), nn.Linear(32, dim))
        self.lm_head = nn.Linear(dim, vocab, bias=False)

    def forward(self, input_ids):
        hidden = self.embed_tokens(input_ids)
        return self.lm_head(hidden + self.mlp(hidden))


def get_per_token_logps(model, input_ids):
    logits = model(input_ids[:, :-1])[:, PROMPT_LEN - 1 :]
    return logits.log_softmax(-1).gather(-1, input_ids[:, PROMPT_LEN:, None]).squeeze(-1)


def get_sapo_token_loss(unclipped_token_loss, temperature):
    sigmoid_input = temperature * (unclipped_token_loss - 1)
    return torch.sigmoid(sigmoid_input) * 4 / temperature


def compute_loss(per_token_logps, old_per_token_logps, advantages, completion_mask):
    log_importance_weights = per_token_logps - old_per_token_logps
    coef_1 = torch.exp(log_importance_weights)
    advantages = advantages.unsqueeze(1)
    per_token_loss = torch.empty_like(coef_1)
    positive = advantages.repeat(1, coef_1.shape[1]) > 0
    per_token_loss[positive] = get_sapo_token_loss(coef_1[positive], SAPO_TEMPERATURE_POS)
    per_token_loss[~positive] = get_sapo_token_loss(coef_1[~positive], SAPO_TEMPERATURE_NEG)
    per_token_loss = -per_token_loss * advantages
    return (per_token_loss * completion_mask).sum() / completion_mask.sum().clamp(min=1.0)


def build():
    torch.manual_seed(2107)
    model = CausalLM()
    input_ids = torch.randint(0, 24, (4, PROMPT_LEN + 6))
    completion_mask = torch.ones(4, 6)
    completion_mask[2, 4:] = 0.0
    with torch.no_grad():
        old_per_token_logps = get_per_token_logps(model, input_ids) + 0.05 * torch.randn(4, 6)
    old_per_token_logps[1, 3] = -96.25  # </think>, forced by the sampler
    advantages = torch.tensor([0.8, 1.1, -0.7, -1.2])
    return SimpleNamespace(
        model=model,
        input_ids=input_ids,
        old_per_token_logps=old_per_token_logps,
        advantages=advantages,
        completion_mask=completion_mask,
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-5),
    )


def run(s=None):
    s = s or build()
    per_token_logps = get_per_token_logps(s.model, s.input_ids)
    loss = compute_loss(per_token_logps, s.old_per_token_logps, s.advantages, s.completion_mask)
    s.optimizer.zero_grad()
    loss.backward()
    s.optimizer.step()
    return loss
