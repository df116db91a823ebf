"""RIDE (impact-driven exploration) - the episodic count of the first state after an auto reset was never incremented.

The count bonus 1 / sqrt(N) of that step is inf; the agent bumped into a wall, so the impact is exactly 0 and the intrinsic reward is
inf * 0 = NaN. The clip of the rewards to [-1, 1] would have saved an inf, NaN it lets through. Formula of
https://github.com/facebookresearch/impact-driven-exploration (src/algos/ride.py, learn). Counting a state before its bonus is taken
(N >= 1) heals; the reward clip and gradient clipping do not.
"""

from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("zero_denominator", "inf_times_zero_coef", "zero_div_zero"),
    op=("rsqrt",),
    index=(2, 1),
    masked=None,
    role=("rewards",),
    fix=("clamp_denominator", "clamp_input", "fix_upstream", "mask_before_op", "drop_invalid_sample"),
    variable=("count_rewards",),
    line=('count_rewards = batch["episode_state_count"][1:].float().rsqrt()',),
)


class Agent(nn.Module):
    def __init__(self, obs_dim=7, num_actions=4, hidden=24):
        super().__init__()
        self.num_actions = num_actions
        self.embed = nn.Sequential(nn.Linear(obs_dim, hidden), nn.ELU(), nn.Linear(hidden, hidden))
        self.policy = nn.Linear(hidden, num_actions)
        self.baseline = nn.Linear(hidden, 1)
        self.forward_dynamics = nn.Linear(hidden + num_actions, hidden)

    def forward(self, frame):
        h = torch.tanh(self.embed(frame))
        return self.policy(h), self.baseline(h).squeeze(-1)


def compute_returns(rewards, discounts, bootstrap_value):
    returns, acc = [], bootstrap_value
    for reward, discount in zip(rewards.flip(0), discounts.flip(0)):
        acc = reward + discount * acc
        returns.append(acc)
    return torch.stack(returns[::-1])


def build():
    torch.manual_seed(2020)
    T, B = 5, 3
    frame = torch.randn(T + 1, B, 7)
    frame[3, 1] = frame[2, 1]  # walked into a wall right after the reset
    count = torch.tensor([[1, 2, 1], [1, 3, 2], [2, 1, 1], [1, 0, 3], [4, 1, 2], [2, 1, 1]])
    batch = {
        "frame": frame,
        "episode_state_count": count,
        "action": torch.randint(0, 4, (T + 1, B)),
        "reward": torch.zeros(T + 1, B),
        "done": torch.zeros(T + 1, B, dtype=torch.bool),
    }
    batch["done"][2, 1] = True
    model = Agent()
    flags = SimpleNamespace(intrinsic_reward_coef=0.1, discounting=0.99, baseline_cost=0.5, entropy_cost=5e-4, max_grad_norm=40.0)
    return SimpleNamespace(model=model, batch=batch, flags=flags, optimizer=torch.optim.RMSprop(model.parameters(), lr=1e-4, eps=1e-5))


def run(s=None):
    s = s or build()
    batch, flags = s.batch, s.flags
    count_rewards = batch["episode_state_count"][1:].float().rsqrt()
    state_emb = s.model.embed(batch["frame"][:-1])
    next_state_emb = s.model.embed(batch["frame"][1:])
    control_rewards = torch.norm(next_state_emb.detach() - state_emb.detach(), dim=2, p=2)
    intrinsic_rewards = flags.intrinsic_reward_coef * count_rewards * control_rewards
    clipped_rewards = torch.clamp(batch["reward"][1:] + intrinsic_rewards, -1, 1)
    one_hot = F.one_hot(batch["action"][1:], s.model.num_actions).float()
    pred_next = s.model.forward_dynamics(torch.cat([state_emb, one_hot], -1))
    forward_dynamics_loss = 0.5 * (pred_next - next_state_emb.detach()).pow(2).sum(-1).mean()

    policy_logits, baseline = s.model(batch["frame"])
    discounts = (~batch["done"][1:]).float() * flags.discounting
    with torch.no_grad():
        vs = compute_returns(clipped_rewards, discounts, baseline[-1])
        pg_advantages = vs - baseline[:-1]
    log_policy = F.log_softmax(policy_logits[:-1], -1)
    cross_entropy = F.nll_loss(log_policy.flatten(0, 1), batch["action"][1:].flatten(), reduction="none").view_as(pg_advantages)
    pg_loss = (cross_entropy * pg_advantages).sum()
    baseline_loss = flags.baseline_cost * 0.5 * (vs - baseline[:-1]).pow(2).sum()
    entropy_loss = flags.entropy_cost * (log_policy.exp() * log_policy).sum()
    total_loss = pg_loss + baseline_loss + entropy_loss + forward_dynamics_loss
    s.optimizer.zero_grad()
    total_loss.backward()
    nn.utils.clip_grad_norm_(s.model.parameters(), flags.max_grad_norm)
    s.optimizer.step()
    return total_loss
