"""CleanRL's PPG, auxiliary phase, on a game with illegal actions: the logits of the old and of the new policy are -inf on the same actions.
kl_divergence of two Categoricals forms -inf - (-inf) = NaN there and writes 0 over it where the old probability is 0. Backward gives 0 times
the old probability, which is finite, so gradients and weights are right.

https://github.com/vwxyzjn/cleanrl/blob/master/cleanrl/ppg_procgen.py (auxiliary phase, td.kl_divergence)
"""

from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.distributions as td


class Agent(nn.Module):
    def __init__(self, obs_dim=9, actions=6, hidden=24):
        super().__init__()
        self.network = nn.Sequential(nn.Linear(obs_dim, hidden), nn.ReLU())
        self.actor = nn.Linear(hidden, actions)
        self.aux_critic = nn.Linear(hidden, 1)
        self.critic = nn.Linear(hidden, 1)

    def get_pi_value_and_aux_value(self, x, legal):
        hidden = self.network(x)
        logits = self.actor(hidden).masked_fill(~legal, float("-inf"))
        return td.Categorical(logits=logits), self.critic(hidden.detach()), self.aux_critic(hidden)

    def get_pi(self, x, legal):
        return td.Categorical(logits=self.actor(self.network(x)).masked_fill(~legal, float("-inf")))


def build():
    torch.manual_seed(2213)
    model = Agent()
    obs = torch.randn(12, 9)
    legal = torch.rand(12, 6) < 0.7
    legal[:, 0] = True
    with torch.no_grad():
        old_pi_logits = model.get_pi(obs, legal).logits.clone()
        for p in model.actor.parameters():  # the policy phase has moved on since
            p.add_(0.05 * torch.randn_like(p))
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-4, eps=1e-8)
    return SimpleNamespace(model=model, optimizer=optimizer, obs=obs, legal=legal, old_pi_logits=old_pi_logits, returns=torch.randn(12))


def run(s=None, num_aux_minibatches=2, beta_clone=1.0, max_grad_norm=0.5):
    s = s or build()
    for rows in torch.arange(12).chunk(num_aux_minibatches):
        old_agent_dist = td.Categorical(logits=s.old_pi_logits[rows])
        new_pi, new_values, new_aux_values = s.model.get_pi_value_and_aux_value(s.obs[rows], s.legal[rows])
        kl_loss = td.kl_divergence(old_agent_dist, new_pi).mean()
        real_value_loss = 0.5 * ((new_values.view(-1) - s.returns[rows]) ** 2).mean()
        aux_value_loss = 0.5 * ((new_aux_values.view(-1) - s.returns[rows]) ** 2).mean()
        joint_loss = aux_value_loss + beta_clone * kl_loss
        loss = joint_loss + real_value_loss
        s.optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(s.model.parameters(), max_grad_norm)
        s.optimizer.step()
    return loss


if __name__ == "__main__":
    run()
