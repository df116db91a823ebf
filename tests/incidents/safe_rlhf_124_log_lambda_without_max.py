"""PKU-Alignment/safe-rlhf PR #124 (https://github.com/PKU-Alignment/safe-rlhf/pull/124): PPO-Lag before the multiplier had a maximum.

The Lagrange multiplier is exp(log_lambda), trained by SGD on the episode cost. The costs of a new cost model are not normalised (about 40), so
its gradient grows with the multiplier itself: log_lambda goes 0, 4, 222, and exp(222) is inf. The reward advantage minus inf times the cost
advantage over 1 + inf is NaN, and the actor is lost. A maximum of log_lambda (the PR), a smaller lambda_lr or normalised costs heal it;
clipping the actor's gradient or its ratio does not.
"""

from types import SimpleNamespace

import torch
import torch.nn as nn

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("exp_overflow",),
    op=("exp",),
    index=(),
    masked=None,
    role=("advantages", "weights", "loss", "rewards", "is_weight"),
    fix=("clamp_exponent", "clamp_input", "validate_config", "fix_upstream", "stable_function"),
    variable=("multiplier",),
    line=("multiplier = s.log_lambda.exp().detach()",),
)


class Actor(nn.Module):
    def __init__(self, vocab=19, hidden=10):
        super().__init__()
        self.embed = nn.Embedding(vocab, hidden)
        self.fc = nn.Linear(hidden, hidden)
        self.lm_head = nn.Linear(hidden, vocab)

    def forward(self, input_ids):
        return self.lm_head(torch.relu(self.fc(self.embed(input_ids))))


def gather_log_probabilities(logits, labels):
    return logits.log_softmax(-1).gather(-1, labels.unsqueeze(-1)).squeeze(-1)


def actor_loss_fn(multiplier, log_probs, old_log_probs, reward_advantages, cost_advantages, mask, clip_range_ratio=0.2):
    advantages = (reward_advantages - multiplier * cost_advantages) / (1.0 + multiplier)
    ratios = torch.exp(log_probs - old_log_probs)
    surrogate1 = advantages * ratios
    surrogate2 = advantages * ratios.clamp(1.0 - clip_range_ratio, 1.0 + clip_range_ratio)
    return -(torch.minimum(surrogate1, surrogate2) * mask).sum() / mask.sum()


def build():
    torch.manual_seed(504)
    actor = Actor()
    rollouts = []
    for _ in range(2):
        input_ids = torch.randint(0, 19, (3, 9))
        mask = torch.ones(3, 8)
        mask[2, 5:] = 0
        with torch.no_grad():
            old_log_probs = gather_log_probabilities(actor(input_ids[:, :-1]), input_ids[:, 1:])
        rollouts.append(
            dict(
                input_ids=input_ids,
                mask=mask,
                old_log_probs=old_log_probs,
                reward_advantages=torch.randn(3, 8),
                cost_advantages=torch.randn(3, 8) + 0.5,
                episode_cost=torch.tensor([38.0, 41.0, 41.0]),
            )
        )
    log_lambda = nn.Parameter(torch.tensor(0.0))
    return SimpleNamespace(
        model=actor,
        rollouts=rollouts,
        log_lambda=log_lambda,
        threshold=0.0,
        log_lambda_optimizer=torch.optim.SGD([log_lambda], lr=0.1),
        optimizer=torch.optim.AdamW(actor.parameters(), lr=1e-4),
    )


def run(s=None):
    s = s or build()
    for batch in s.rollouts:
        lambda_loss = -(batch["episode_cost"].mean() - s.threshold) * s.log_lambda.exp()
        s.log_lambda_optimizer.zero_grad()
        lambda_loss.backward()
        s.log_lambda_optimizer.step()

        multiplier = s.log_lambda.exp().detach()
        log_probs = gather_log_probabilities(s.model(batch["input_ids"][:, :-1]), batch["input_ids"][:, 1:])
        actor_loss = actor_loss_fn(
            multiplier, log_probs, batch["old_log_probs"], batch["reward_advantages"], batch["cost_advantages"], batch["mask"]
        )
        s.optimizer.zero_grad()
        actor_loss.backward()
        nn.utils.clip_grad_norm_(s.model.parameters(), 1.0)
        s.optimizer.step()
    return actor_loss


if __name__ == "__main__":
    run()
