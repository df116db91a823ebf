"""EfficientZero #18 (state_norm) - the hidden state is scaled to [0, 1] by its own minimum and maximum, without an epsilon.

The renormalize that EfficientZero and SPR share divides by max - min. For a black frame (the screen between two lives) every unit behind the
ReLU is 0: max == min, the hidden state of that sample is 0/0, and with it the policy, the value and the reward that are unrolled from it.
Heals: a floor of, or an epsilon in, the denominator; leaving a flat state as it is. (nan_to_num of the hidden state gets through as well, only
because the backward of a dead ReLU drops the NaN.) Does not: nan_to_num of the sample's loss, a replay weight of 0 for the sample.
Source: https://github.com/YeWR/EfficientZero/issues/18, config/atari/model.py and core/model.py (renormalize)
"""

from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("zero_div_zero", "zero_denominator"),
    op=("div",),
    index=(1, 0),
    masked=None,
    role=("hidden",),
    fix=("clamp_denominator", "representable_eps", "mask_before_op", "guard_small_group", "avoid_singular_op", "drop_invalid_sample"),
    variable=("flat_tensor", "state"),
    line=("flat_tensor = (flat_tensor - min) / (max - min)",),
)


def renormalize(tensor, first_dim=1):
    flat_tensor = tensor.view(*tensor.shape[:first_dim], -1)
    max = torch.max(flat_tensor, first_dim, keepdim=True).values
    min = torch.min(flat_tensor, first_dim, keepdim=True).values
    flat_tensor = (flat_tensor - min) / (max - min)
    return flat_tensor.view(*tensor.shape)


class MuZeroNet(nn.Module):
    def __init__(self, channels=4, actions=3, support=5):
        super().__init__()
        self.actions = actions
        self.representation_network = nn.Sequential(nn.Conv2d(1, channels, 3, stride=2, padding=1), nn.ReLU())
        self.dynamics_network = nn.Sequential(nn.Conv2d(channels + 1, channels, 3, padding=1), nn.ReLU())
        self.fc_reward = nn.Linear(channels * 16, support)
        self.fc_value = nn.Linear(channels * 16, support)
        self.fc_policy = nn.Linear(channels * 16, actions)

    def initial_inference(self, obs):
        state = renormalize(self.representation_network(obs))
        return state, self.fc_policy(state.flatten(1)), self.fc_value(state.flatten(1))

    def recurrent_inference(self, state, action):
        plane = (action.float() / self.actions)[:, None, None, None].expand(-1, 1, *state.shape[2:])
        next_state = self.dynamics_network(torch.cat([state, plane], dim=1)) + state
        return next_state, self.fc_reward(next_state.flatten(1))


def build():
    torch.manual_seed(18)
    model = MuZeroNet()
    with torch.no_grad():
        model.representation_network[0].bias.copy_(torch.tensor([-0.05, -0.10, -0.02, -0.07]))
    obs = torch.rand(4, 1, 8, 8)
    obs[1] = 0.0  # between two lives
    batch = dict(
        obs=obs,
        action=torch.randint(0, 3, (4,)),
        policy=torch.rand(4, 3).softmax(-1),
        value=torch.randint(0, 5, (4,)),
        reward=torch.randint(0, 5, (4,)),
        weights=torch.tensor([1.0, 0.7, 0.9, 0.5]),
    )
    return SimpleNamespace(model=model, batch=batch, optimizer=torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9, weight_decay=1e-4))


def run(s=None):
    s = s or build()
    b = s.batch
    state, policy_logits, value_logits = s.model.initial_inference(b["obs"])
    _, reward_logits = s.model.recurrent_inference(state, b["action"])
    policy_loss = -(F.log_softmax(policy_logits, dim=1) * b["policy"]).sum(1)
    value_loss = F.cross_entropy(value_logits, b["value"], reduction="none")
    reward_loss = F.cross_entropy(reward_logits, b["reward"], reduction="none")
    loss = (b["weights"] * (policy_loss + 0.25 * value_loss + reward_loss)).mean()
    s.optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(s.model.parameters(), 5.0)
    s.optimizer.step()
    return loss
