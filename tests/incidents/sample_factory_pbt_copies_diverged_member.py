"""Sample Factory, population based training - the weights of a diverged member replace those of a healthy one.

Policy 0 took a non-finite step; its episodes still end, with an objective of NaN. The round sorts the members by their objective: comparisons with
NaN are False, so the NaN member at the head of the list is never moved down and counts as the best. Policy 2, the worst of the finite ones, loads its weights. The next
learner step of policy 2 starts with a NaN in the critic, and the shared encoder spreads it.
Source: function _update_policy of https://github.com/alex-petrenko/sample-factory/blob/master/sample_factory/pbt/population_based_training.py

Heals: leave members with a non-finite objective (or non-finite weights) out of the ranking, skip the bad step of policy 0, reload policy 2.
Does not: clip gradients in policy 2, or lower its learning rate.
"""

from types import SimpleNamespace

import torch
import torch.nn as nn

from expected import Expected

EXPECTED = Expected(
    phase=("weights",),
    cause=("poisoned_weights",),
    op=("any", "addmm", "linear", "load_state_dict", "copy_"),
    index=None,
    masked=None,
    role=("weights",),
    fix=("fix_upstream", "reload_checkpoint", "skip_bad_step", "reject_input"),
    variable=("critic_linear.weight",),
    line=("values = self.critic_linear(core).squeeze(-1)",),
)


class ActorCriticSharedWeights(nn.Module):
    def __init__(self, obs_dim=12, num_actions=5, size=32):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(obs_dim, size), nn.ELU())
        self.core = nn.GRUCell(size, size)
        self.action_parameterization = nn.Linear(size, num_actions)
        self.critic_linear = nn.Linear(size, 1)

    def forward(self, obs, rnn_states):
        core = self.core(self.encoder(obs), rnn_states)
        values = self.critic_linear(core).squeeze(-1)
        return self.action_parameterization(core).log_softmax(-1), values


def diverging_step(policy):
    optimizer = torch.optim.Adam(policy.parameters(), lr=1e-4)
    for p in policy.parameters():
        p.grad = 0.01 * torch.randn_like(p)
    policy.critic_linear.weight.grad[0, 9] = float("inf")
    optimizer.step()


def pbt_round(policies, objectives, replace_number=1):
    ranking = sorted(zip(objectives, range(len(policies))), reverse=True)
    order = [policy_id for _, policy_id in ranking]
    for worst, best in zip(order[-replace_number:], order[:replace_number]):
        policies[worst].load_state_dict(policies[best].state_dict())
    return order


def build():
    torch.manual_seed(77)
    policies = [ActorCriticSharedWeights() for _ in range(3)]
    diverging_step(policies[0])
    order = pbt_round(policies, objectives=[float("nan"), 14.5, 3.25])
    model = policies[2]
    n = 24
    return SimpleNamespace(
        model=model,
        policies=policies,
        order=order,
        obs=torch.randn(n, 12),
        rnn_states=0.1 * torch.randn(n, 32),
        actions=torch.randint(0, 5, (n,)),
        old_log_probs=torch.full((n,), -1.6),
        advantages=torch.randn(n),
        returns=torch.randn(n),
        optimizer=torch.optim.Adam(model.parameters(), lr=1e-4, eps=1e-6),
    )


def run(s=None):
    s = s or build()
    log_probs_all, values = s.model(s.obs, s.rnn_states)
    log_probs = log_probs_all.gather(-1, s.actions.unsqueeze(-1)).squeeze(-1)
    ratio = torch.exp(log_probs - s.old_log_probs)
    policy_loss = -torch.min(ratio * s.advantages, ratio.clamp(1 / 1.1, 1.1) * s.advantages).mean()
    value_loss = (values - s.returns).pow(2).mean()
    exploration_loss = (log_probs_all.exp() * log_probs_all).sum(-1).mean()
    loss = policy_loss + 0.5 * value_loss + 0.003 * exploration_loss
    s.optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(s.model.parameters(), 4.0)
    s.optimizer.step()
    return loss


if __name__ == "__main__":
    run()
