"""Invalid actions are masked with -inf logits, and torch.distributions.Categorical copes: log_prob and entropy are right.

CleanRL's invalid-action masking fills the logits with -1e8 out of caution; here it is -inf. Categorical clamps its normalised logits to the
smallest finite number before p * log p, so the entropy is that of the valid actions, and no chosen action is an invalid one. The -inf
never meets a 0 and the gradients of the masked logits are 0.
Source: vwxyzjn/invalid-action-masking ppo.py `CategoricalMasked`, torch/distributions/categorical.py `entropy`.
"""

from types import SimpleNamespace

import torch
import torch.nn as nn
from torch.distributions import Categorical


class Agent(nn.Module):
    def __init__(self, obs_dim=6, n_actions=5):
        super().__init__()
        self.network = nn.Sequential(nn.Linear(obs_dim, 32), nn.Tanh())
        self.actor = nn.Linear(32, n_actions)
        self.critic = nn.Linear(32, 1)

    def get_action_and_value(self, x, invalid_action_masks, action):
        hidden = self.network(x)
        logits = self.actor(hidden)
        logits = torch.where(invalid_action_masks, logits, torch.tensor(float("-inf")))
        probs = Categorical(logits=logits, validate_args=False)
        return probs.log_prob(action), probs.entropy(), self.critic(hidden).squeeze(-1)


def build():
    torch.manual_seed(3002)
    agent = Agent()
    obs = torch.randn(12, 6)
    invalid_action_masks = torch.rand(12, 5) > 0.4
    invalid_action_masks[:, 0] = True
    invalid_action_masks[4] = torch.tensor([True, False, False, False, False])  # one legal move
    with torch.no_grad():
        logits = agent.actor(agent.network(obs)).masked_fill(~invalid_action_masks, float("-inf"))
        actions = torch.multinomial(logits.softmax(-1), 1).squeeze(1)
        old_log_probs = logits.log_softmax(-1).gather(1, actions[:, None]).squeeze(1)
    optimizer = torch.optim.Adam(agent.parameters(), lr=2.5e-4, eps=1e-5)
    return SimpleNamespace(
        model=agent,
        optimizer=optimizer,
        obs=obs,
        masks=invalid_action_masks,
        actions=actions,
        old_log_probs=old_log_probs,
        advantages=torch.randn(12),
        returns=torch.randn(12),
        ent_coef=0.01,
        vf_coef=0.5,
        clip_coef=0.1,
    )


def run(s=None):
    s = s or build()
    newlogprob, entropy, newvalue = s.model.get_action_and_value(s.obs, s.masks, s.actions)
    logratio = newlogprob - s.old_log_probs
    ratio = logratio.exp()
    advantages = (s.advantages - s.advantages.mean()) / (s.advantages.std() + 1e-8)
    pg_loss1 = -advantages * ratio
    pg_loss2 = -advantages * torch.clamp(ratio, 1 - s.clip_coef, 1 + s.clip_coef)
    pg_loss = torch.max(pg_loss1, pg_loss2).mean()
    v_loss = 0.5 * ((newvalue - s.returns) ** 2).mean()
    entropy_loss = entropy.mean()
    loss = pg_loss - s.ent_coef * entropy_loss + v_loss * s.vf_coef
    s.optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(s.model.parameters(), 0.5)
    s.optimizer.step()
    return loss
