"""Leave-one-out advantages divide by the spread of the other samples; when those agree up to rounding the spread is
1e-8 and one step is 1e7 times too big.
"""

from types import SimpleNamespace

import torch
from torch import nn

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("cancellation_spike",),
    op=("div", "std", "sqrt"),
    index=(1, 3),
    masked=None,
    role=("advantages", "rewards"),
    fix=("clamp_denominator", "guard_small_group", "clamp_input", "representable_eps", "skip_bad_step"),
    variable=("advantages",),
    line=("advantages = (rewards - centre) / spread",),
)


def others(rewards):
    """[P, G] -> [P, G, G - 1]: for each sample the rewards of its siblings."""
    group = rewards.shape[1]
    keep = ~torch.eye(group, dtype=torch.bool)
    return rewards[:, None, :].expand(-1, group, -1)[:, keep].view(-1, group, group - 1)


def rloo_scaled(rewards):
    siblings = others(rewards)
    centre = siblings.mean(dim=-1)
    spread = siblings.std(dim=-1)
    advantages = (rewards - centre) / spread
    return advantages


def build():
    torch.manual_seed(106)
    policy = nn.Sequential(nn.Embedding(17, 8), nn.Linear(8, 17))
    rewards = torch.rand(10, 3, 5)
    # three rubric points add up to the same total in a different order; one sample differs
    a, b, c = torch.tensor(0.1), torch.tensor(0.2), torch.tensor(0.4)
    rewards[8, 1] = torch.stack([(a + b) + c, (a + c) + b, (b + c) + a, torch.tensor(0.2), (a + c) + b])
    tokens = torch.randint(0, 17, (10, 3, 5, 8))
    optimizer = torch.optim.SGD(policy.parameters(), lr=0.05)
    return SimpleNamespace(model=policy, optimizer=optimizer, batch=SimpleNamespace(tokens=tokens, rewards=rewards))


def update(policy, optimizer, tokens, rewards):
    logps = policy(tokens[..., :-1]).log_softmax(-1)
    seq_logp = logps.gather(-1, tokens[..., 1:, None]).squeeze(-1).mean(-1)
    loss = -(rloo_scaled(rewards) * seq_logp).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss


def run(s=None):
    s = s or build()
    for tokens, rewards in zip(s.batch.tokens[:9], s.batch.rewards[:9]):
        loss = update(s.model, s.optimizer, tokens, rewards)
    return loss
