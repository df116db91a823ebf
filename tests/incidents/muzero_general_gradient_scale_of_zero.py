"""muzero-general: the gradient of every unrolled step is divided, in a tensor hook, by the number of actions that are left in the game. The
replay buffer drew a position past the last action (a reanalysed game has one root value more), so it divides by 0: the loss is finite, the
gradient of that game's losses is inf, and its way back through softmax and ReLU makes NaN.

https://github.com/werner-duvaud/muzero-general/blob/master/trainer.py (Trainer.update_weights, "Scale gradient by the number of unroll steps")
https://github.com/werner-duvaud/muzero-general/blob/master/replay_buffer.py (get_batch, gradient_scale_batch)

Heals: at least 1 in gradient_scale_batch, or drawing positions below the number of actions only. Does not: clipping the gradient norm, or
a mask on the loss of the bad game after the hooks are set (0 / 0).
"""

from types import SimpleNamespace

import torch
import torch.nn as nn

from expected import Expected

EXPECTED = Expected(
    phase=("backward",),
    cause=("zero_denominator", "zero_div_zero"),
    op=("div",),
    index=(2,),
    masked=None,
    role=("grad", "loss"),
    fix=("clamp_denominator", "guard_empty", "fix_upstream", "drop_invalid_sample", "clamp_input", "reject_input"),
    variable=(None, "grad"),
    line=("current_loss.register_hook(lambda grad: grad / gradient_scale_batch[:, i])",),
)


class MuZeroNetwork(nn.Module):
    def __init__(self, obs_dim=8, actions=3, support=5, hidden=16):
        super().__init__()
        self.actions = actions
        self.representation = nn.Sequential(nn.Linear(obs_dim, hidden), nn.ELU())
        self.dynamics = nn.Sequential(nn.Linear(hidden + actions, hidden), nn.ELU())
        self.reward = nn.Linear(hidden, support)
        self.policy = nn.Linear(hidden, actions)
        self.value = nn.Linear(hidden, support)

    def initial_inference(self, observation):
        state = self.representation(observation)
        return self.value(state), torch.zeros(len(state), 5), self.policy(state), state

    def recurrent_inference(self, state, action):
        one_hot = nn.functional.one_hot(action, self.actions).float()
        state = self.dynamics(torch.cat([state, one_hot], dim=1))
        return self.value(state), self.reward(state), self.policy(state), state


def loss_function(value, reward, policy_logits, target_value, target_reward, target_policy):
    value_loss = (-target_value * value.log_softmax(1)).sum(1)
    reward_loss = (-target_reward * reward.log_softmax(1)).sum(1)
    policy_loss = (-target_policy * policy_logits.log_softmax(1)).sum(1)
    return value_loss, reward_loss, policy_loss


def update_weights(s, batch):
    gradient_scale_batch = batch["gradient_scale"]
    value, reward, policy_logits, hidden_state = s.model.initial_inference(batch["observation"])
    predictions = [(value, reward, policy_logits)]
    for i in range(1, batch["action"].shape[1]):
        value, reward, policy_logits, hidden_state = s.model.recurrent_inference(hidden_state, batch["action"][:, i])
        hidden_state.register_hook(lambda grad: grad * 0.5)
        predictions.append((value, reward, policy_logits))
    target_value, target_reward, target_policy = batch["value"], batch["reward"], batch["policy"]
    value_loss, _, policy_loss = loss_function(*predictions[0], target_value[:, 0], target_reward[:, 0], target_policy[:, 0])
    reward_loss = torch.zeros_like(value_loss)
    for i in range(1, len(predictions)):
        losses = loss_function(*predictions[i], target_value[:, i], target_reward[:, i], target_policy[:, i])
        for current_loss in losses:
            current_loss.register_hook(lambda grad: grad / gradient_scale_batch[:, i])
        value_loss, reward_loss, policy_loss = value_loss + losses[0], reward_loss + losses[1], policy_loss + losses[2]
    loss = (value_loss * 0.25 + reward_loss + policy_loss).mean()
    s.optimizer.zero_grad()
    loss.backward()
    s.optimizer.step()
    return loss


def build():
    torch.manual_seed(2204)
    model = MuZeroNetwork()
    num_unroll_steps, games = 3, 4
    game_lengths = torch.tensor([12, 9, 7, 15])
    game_pos = torch.tensor([2, 7, 7, 5])  # the third game has 7 actions: positions 0 to 6
    gradient_scale = torch.clamp(game_lengths - game_pos, max=num_unroll_steps)
    batch = dict(
        observation=torch.randn(games, 8),
        action=torch.randint(0, 3, (games, num_unroll_steps + 1)),
        value=torch.rand(games, num_unroll_steps + 1, 5).softmax(-1),
        reward=torch.rand(games, num_unroll_steps + 1, 5).softmax(-1),
        policy=torch.rand(games, num_unroll_steps + 1, 3).softmax(-1),
        gradient_scale=gradient_scale.float()[:, None].expand(games, num_unroll_steps + 1),
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3, weight_decay=1e-4)
    return SimpleNamespace(model=model, optimizer=optimizer, batch=batch)


def run(s=None):
    s = s or build()
    return update_weights(s, s.batch)


if __name__ == "__main__":
    run()
