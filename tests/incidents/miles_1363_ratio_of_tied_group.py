"""miles, clipped policy loss of long agentic rollouts of which one group was tied.

A token of a partial rollout has a log-prob of about -95 under the policy that sampled it (another version of the weights) and a good one now, so (-ppo_kl).exp() is
inf. Its group had equal rewards and advantage 0: -ratio * advantages is inf * 0, on a token that the loss counts. (Source: radixark/miles, pull request 1363,
miles/backends/training_utils/loss_hub/math_utils.py, compute_policy_loss as it was.) Heals: clamping -ppo_kl to [-20, 20]; leaving tied samples out before the
exp; where(advantages == 0, 0, -ppo_kl) before it. Does not: ratio.clamp after the exp for pg_losses1 (gradient 0 * inf); where(advantages == 0, 0, pg_losses) at the end (gradient is NaN).
"""

from types import SimpleNamespace

import torch
from torch import nn

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("inf_times_zero_coef", "exp_overflow"),
    op=("exp",),
    index=(15,),
    masked=False,
    role=("ratio", "is_weight"),
    fix=("clamp_exponent", "drop_invalid_sample", "mask_before_op", "skip_disabled_term", "where_on_detached", "clamp_input"),
    variable=("ratio",),
    line=("ratio = (-ppo_kl).exp()",),
)


class Actor(nn.Module):
    def __init__(self, vocab=20, dim=16):
        super().__init__()
        self.embedding = nn.Embedding(vocab, dim)
        self.norm = nn.RMSNorm(dim)
        self.output_layer = nn.Linear(dim, vocab, bias=False)

    def forward(self, tokens):
        return self.output_layer(self.norm(self.embedding(tokens)))


def compute_policy_loss(ppo_kl, advantages, eps_clip, eps_clip_high):
    ratio = (-ppo_kl).exp()
    pg_losses1 = -ratio * advantages
    pg_losses2 = -ratio.clamp(1 - eps_clip, 1 + eps_clip_high) * advantages
    clip_pg_losses1 = torch.maximum(pg_losses1, pg_losses2)
    clipfrac = torch.gt(pg_losses2, pg_losses1).float()
    return clip_pg_losses1, clipfrac


def get_log_probs(model, batch):
    log_probs = []
    for tokens, response_length in zip(batch["tokens"], batch["response_lengths"]):
        logits = model(tokens)[-response_length - 1 : -1]
        log_probs.append(logits.log_softmax(-1).gather(-1, tokens[-response_length:, None]).squeeze(-1))
    return log_probs


def grpo_returns(rewards, n_samples_per_prompt):
    rewards = rewards.view(-1, n_samples_per_prompt)
    rewards = rewards - rewards.mean(dim=-1, keepdim=True)
    return (rewards / (rewards.std(dim=-1, keepdim=True) + 1e-6)).flatten()


def build():
    torch.manual_seed(3)
    model = Actor()
    lengths = [5, 7, 6, 4]
    batch = {
        "tokens": [torch.randint(0, 20, (3 + n,)) for n in lengths],
        "response_lengths": lengths,
        "loss_masks": [torch.ones(n) for n in lengths],
        "rewards": torch.tensor([1.0, 0.0, 0.0, 0.0]),
    }
    with torch.no_grad():
        batch["rollout_log_probs"] = [lp + 0.03 * torch.randn_like(lp) for lp in get_log_probs(model, batch)]
    batch["rollout_log_probs"][2][3] = -96.5
    return SimpleNamespace(model=model, optimizer=torch.optim.Adam(model.parameters(), lr=1e-3), batch=batch)


def run(s=None):
    s = s or build()
    batch = s.batch
    returns = grpo_returns(batch["rewards"], n_samples_per_prompt=2)
    advantages = torch.cat([r.expand(n) for r, n in zip(returns, batch["response_lengths"])])
    old_log_probs = torch.cat(batch["rollout_log_probs"])
    loss_masks = torch.cat(batch["loss_masks"])

    log_probs = torch.cat(get_log_probs(s.model, batch))
    ppo_kl = old_log_probs - log_probs
    pg_loss, pg_clipfrac = compute_policy_loss(ppo_kl, advantages, 0.2, 0.28)
    loss = (pg_loss * loss_masks).sum() / loss_masks.sum()

    s.optimizer.zero_grad()
    loss.backward()
    s.optimizer.step()
    return loss


if __name__ == "__main__":
    print(run())
