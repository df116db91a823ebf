"""EasyR1, masked_whiten of the advantages (https://github.com/hiyouga/EasyR1/blob/main/verl/utils/torch_functional.py, function masked_whiten).

REINFORCE++ with an outcome reward: every response of the batch failed, so every token has the return -1 and the variance is exactly 0. The
rollout worker hands its scores over in half precision, in which the 1e-8 under the root rounds to 0: rsqrt(0) is inf, and inf times the
centred return of 0 is NaN. Whitening in float32, an epsilon that half can hold or no whitening of a flat batch heals it; lowering the
learning rate or clipping the gradient norm does not, and nan_to_num of the loss leaves NaN in the gradient.
"""

from types import SimpleNamespace

import torch
import torch.nn as nn

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("eps_underflow",),
    op=("rsqrt",),
    index=(),
    masked=None,
    role=("advantages",),
    fix=("representable_eps", "upcast_fp32", "clamp_denominator", "guard_small_group", "avoid_singular_op", "fix_upstream"),
    variable=(None,),
    line=("whitened = (values - mean) * torch.rsqrt(var + eps)",),
)


class Policy(nn.Module):
    def __init__(self, vocab=17, hidden=12):
        super().__init__()
        self.embed_tokens = nn.Embedding(vocab, hidden)
        self.mixer = nn.GRU(hidden, hidden, batch_first=True)
        self.lm_head = nn.Linear(hidden, vocab, bias=False)

    def forward(self, input_ids):
        return self.lm_head(self.mixer(self.embed_tokens(input_ids))[0])


def masked_mean(values, mask):
    return (values * mask).sum() / mask.sum()


def masked_var(values, mask):
    centered = values - masked_mean(values, mask)
    return masked_mean(centered * centered, mask)


def masked_whiten(values, mask, eps=1e-8):
    mean, var = masked_mean(values, mask), masked_var(values, mask)
    whitened = (values - mean) * torch.rsqrt(var + eps)
    return whitened


def compute_reinforce_plus_plus_advantage(token_level_rewards, response_mask):
    returns = token_level_rewards.flip(-1).cumsum(-1).flip(-1) * response_mask
    return masked_whiten(returns, response_mask) * response_mask


def token_logps(model, input_ids):
    logits = model(input_ids[:, :-1])
    return logits.log_softmax(-1).gather(-1, input_ids[:, 1:, None]).squeeze(-1)


def build():
    torch.manual_seed(501)
    model = Policy()
    input_ids = torch.randint(0, 17, (4, 9))
    response_mask = torch.ones(4, 8)
    response_mask[:, :2] = 0
    response_mask[1, 6:] = 0
    response_mask[3, 5:] = 0
    last = response_mask.cumsum(-1).argmax(-1)
    token_level_rewards = torch.zeros(4, 8).scatter(1, last[:, None], -1.0)
    with torch.no_grad():
        old_log_probs = token_logps(model, input_ids)
    return SimpleNamespace(
        model=model,
        input_ids=input_ids,
        response_mask=response_mask,
        old_log_probs=old_log_probs,
        token_level_rewards=token_level_rewards.half(),
        clip_ratio=0.2,
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-4),
    )


def run(s=None):
    s = s or build()
    advantages = compute_reinforce_plus_plus_advantage(s.token_level_rewards, s.response_mask.half()).float()
    log_probs = token_logps(s.model, s.input_ids)
    ratio = torch.exp((log_probs - s.old_log_probs).clamp(-20.0, 20.0))
    clipped_ratio = ratio.clamp(1 - s.clip_ratio, 1 + s.clip_ratio)
    pg_loss = masked_mean(torch.max(-advantages * ratio, -advantages * clipped_ratio), s.response_mask)
    s.optimizer.zero_grad()
    pg_loss.backward()
    nn.utils.clip_grad_norm_(s.model.parameters(), 1.0)
    s.optimizer.step()
    return pg_loss


if __name__ == "__main__":
    run()
