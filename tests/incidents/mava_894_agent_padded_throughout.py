"""Mava #894 (masking of padded sequences): the MAPPO losses divide by the sum of the step mask. The reviewer had met it before:
where an agent has no live step in the mini-batch (it died before the sampled chunk began) the sum is 0 and 0/0 is NaN. The loss
is summed over agents, so one dead agent poisons the shared network.

    https://github.com/instadeepai/Mava/pull/894

Heals: a floor under the mask's sum (or a small epsilon: the numerator is exactly 0), skipping agents without live steps.
Does not heal: nan_to_num on the agent's mean (the gradient of x / 0 stays NaN), clipping of gradients.
"""

from types import SimpleNamespace

import torch
import torch.nn as nn
from torch.distributions import Categorical

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("empty_mask_mean", "zero_div_zero"),
    op=("div",),
    index=(),
    masked=None,
    role=("loss",),
    fix=("clamp_denominator", "guard_empty", "representable_eps", "clamp_input", "drop_invalid_sample"),
    variable=("mean", "policy_mean"),
    line=("mean = (values * mask).sum() / mask.sum()",),
)


class ActorCritic(nn.Module):
    def __init__(self, obs_dim=5, actions=4, hidden=16):
        super().__init__()
        self.torso = nn.Sequential(nn.Linear(obs_dim, hidden), nn.Tanh())
        self.policy_head = nn.Linear(hidden, actions)
        self.critic_head = nn.Linear(hidden, 1)

    def forward(self, obs):
        h = self.torso(obs)
        return Categorical(logits=self.policy_head(h)), self.critic_head(h).squeeze(-1)


def masked_mean(values, mask):
    mean = (values * mask).sum() / mask.sum()
    return mean


def agent_loss(model, batch, clip=0.2, value_cost=0.5, entropy_cost=0.01):
    dist, values = model(batch["obs"])
    log_prob = dist.log_prob(batch["actions"])
    ratio = torch.exp(log_prob - batch["behaviour_log_probs"])
    adv = batch["advantages"]
    surrogate = torch.minimum(ratio * adv, ratio.clamp(1 - clip, 1 + clip) * adv)
    mask = batch["mask"]
    policy_mean = masked_mean(surrogate, mask)
    value_mean = masked_mean((values - batch["target_values"]).square(), mask)
    entropy_mean = masked_mean(dist.entropy(), mask)
    return -policy_mean + value_cost * value_mean - entropy_cost * entropy_mean


def build():
    torch.manual_seed(8)
    model = ActorCritic()
    lengths = {"agent_0": 6, "agent_1": 3, "agent_2": 0}  # agent_2 was out before this chunk began
    batches = {}
    for name, length in lengths.items():
        mask = (torch.arange(6) < length).float()
        obs = torch.randn(6, 5) * mask.unsqueeze(-1)
        actions = torch.randint(0, 4, (6,))
        with torch.no_grad():
            dist, _ = model(obs)
            old = dist.log_prob(actions)
        batches[name] = {
            "obs": obs,
            "actions": actions,
            "behaviour_log_probs": old,
            "advantages": torch.randn(6) * mask,
            "target_values": torch.randn(6) * mask,
            "mask": mask,
        }
    return SimpleNamespace(model=model, batches=batches, optimizer=torch.optim.Adam(model.parameters(), lr=5e-4))


def run(s=None):
    s = s or build()
    losses = {name: agent_loss(s.model, batch) for name, batch in s.batches.items()}
    loss = torch.stack(list(losses.values())).sum()
    s.optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(s.model.parameters(), 0.5)
    s.optimizer.step()
    return loss


if __name__ == "__main__":
    run()
