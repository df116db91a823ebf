"""Looks broken, is healthy. ACER's off-policy bias correction divides by the behaviour probabilities. The behaviour policy of a replayed
step gave one action probability 0 (float32 softmax underflow): rho is +inf there. 1 - c / inf is 1, which is the right limit; the taken actions all have finite rho; gradients and weights end finite.

Source: _train of https://github.com/Kaixhin/ACER/blob/master/train.py
"""

from types import SimpleNamespace

import torch
import torch.nn as nn


class ActorCritic(nn.Module):
    def __init__(self, observation_size=6, action_size=4, hidden_size=24):
        super().__init__()
        self.fc1 = nn.Linear(observation_size, hidden_size)
        self.fc_actor = nn.Linear(hidden_size, action_size)
        self.fc_critic = nn.Linear(hidden_size, action_size)

    def forward(self, x):
        h = torch.relu(self.fc1(x))
        policy = self.fc_actor(h).softmax(-1).clamp(max=1 - 1e-20)
        Q = self.fc_critic(h)
        return policy, Q, (Q * policy).sum(-1, keepdim=True)


def build():
    torch.manual_seed(1611)
    model = ActorCritic()
    states = torch.randn(5, 8, 6)  # time, batch, observation
    behaviour_logits = torch.randn(5, 8, 4)
    behaviour_logits[2, 3] = torch.tensor([130.0, 129.0, 0.0, 128.5])
    old_policies = behaviour_logits.softmax(-1)
    actions = torch.multinomial(old_policies.view(-1, 4), 1).view(5, 8, 1)
    return SimpleNamespace(
        model=model,
        states=states,
        old_policies=old_policies,
        actions=actions,
        rewards=torch.randn(5, 8, 1),
        trace_max=10.0,
        discount=0.99,
        entropy_weight=1e-4,
        optimizer=torch.optim.RMSprop(model.parameters(), lr=7e-4, alpha=0.99),
    )


def run(s=None):
    s = s or build()
    policies, Qs, Vs = zip(*(s.model(x) for x in s.states))
    Qret = Vs[-1].detach()
    policy_loss, value_loss = 0.0, 0.0
    for i in reversed(range(len(policies))):
        rho = policies[i].detach() / s.old_policies[i]
        Qret = s.rewards[i] + s.discount * Qret
        A = Qret - Vs[i]
        log_prob = policies[i].gather(1, s.actions[i]).log()
        single_step_policy_loss = -(rho.gather(1, s.actions[i]).clamp(max=s.trace_max) * log_prob * A.detach()).mean(0)
        bias_weight = (1 - s.trace_max / rho).clamp(min=0) * policies[i]
        advantage = Qs[i].detach() - Vs[i].expand_as(Qs[i]).detach()
        single_step_policy_loss = single_step_policy_loss - (bias_weight * policies[i].log() * advantage).sum(1).mean(0)
        entropy = -(policies[i].log() * policies[i]).sum(1).mean(0)
        policy_loss = policy_loss + single_step_policy_loss - s.entropy_weight * entropy
        Q = Qs[i].gather(1, s.actions[i])
        value_loss = value_loss + ((Qret - Q) ** 2 / 2).mean(0)
        truncated_rho = rho.gather(1, s.actions[i]).clamp(max=1)
        Qret = truncated_rho * (Qret - Q.detach()) + Vs[i].detach()
    loss = (policy_loss + value_loss).sum()
    s.optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(s.model.parameters(), 40.0)
    s.optimizer.step()
    return loss
