"""DeepRL DAC / A-Squared-C PPO - log-probability of an option that the master policy can no longer switch to.

pi_hat = (1 - beta) * previous option + beta * inter-option policy. The termination head has collapsed: sigmoid underflows to beta = 0, the
stored switch has probability 0 and log 0 = -inf. The ratio exp(-inf - old) is 0 and the loss is finite; backward divides that 0 by 0. (The
repository adds 1e-5 before the logarithm; a fork has commented that out.)
Heals: log pi_hat in log space (logsigmoid, log_softmax), a floor under the logarithm. Does not: clamping the log-prob after the logarithm,
nan_to_num of the ratio: the loss was finite before.
Source: https://github.com/ShangtongZhang/DeepRL deep_rl/agent/ASquaredC_PPO_agent.py (compute_pi_hat, compute_log_pi_a)
"""

from types import SimpleNamespace

import torch
import torch.nn as nn

from expected import Expected

EXPECTED = Expected(
    phase=("backward", "forward"),
    cause=("log_zero", "where_grad_trap"),
    op=("log",),
    index=(2, 0),
    masked=False,
    role=("log_probs",),
    fix=("stable_function", "clamp_input", "representable_eps", "avoid_singular_op", "clamp_denominator", "mask_before_op"),
    variable=("log_pi_a", "log_pi"),
    line=("log_pi_a = pi_hat.gather(1, options).log()",),
)


class OptionNet(nn.Module):
    def __init__(self, state_dim=4, num_options=3):
        super().__init__()
        self.fc_beta = nn.Linear(state_dim, num_options)
        self.fc_inter_pi = nn.Linear(state_dim, num_options)
        self.fc_q = nn.Linear(state_dim, num_options)

    def forward(self, states):
        return dict(beta=torch.sigmoid(self.fc_beta(states)), inter_pi=torch.softmax(self.fc_inter_pi(states), dim=-1), q=self.fc_q(states))


def compute_pi_hat(prediction, prev_options, is_initial_states):
    inter_pi = prediction["inter_pi"]
    mask = torch.zeros_like(inter_pi).scatter(1, prev_options, 1.0)
    beta = prediction["beta"].gather(1, prev_options)
    pi_hat = (1 - beta) * mask + beta * inter_pi
    return torch.where(is_initial_states.expand_as(inter_pi), inter_pi, pi_hat)


def compute_log_pi_a(pi_hat, options):
    log_pi_a = pi_hat.gather(1, options).log()
    return log_pi_a


def build():
    torch.manual_seed(8)
    network = OptionNet()
    with torch.no_grad():
        network.fc_beta.weight.zero_()
        network.fc_beta.weight[1] = torch.tensor([0.0, 0.0, -30.0, 0.0])  # option 1 never ends far out on axis 2
        network.fc_beta.bias.zero_()
    states = torch.tensor([[0.2, -0.1, 0.3, 0.5], [0.4, 0.3, -0.6, 0.1], [-0.3, 0.9, 4.1, 0.2], [0.0, -0.7, 0.1, 0.8]])
    entries = dict(
        s=states,
        prev_o=torch.tensor([[0], [2], [1], [1]]),
        o=torch.tensor([[0], [1], [2], [1]]),
        init=torch.tensor([[True], [False], [False], [False]]),
        adv=torch.tensor([[0.5], [-0.8], [1.1], [0.2]]),
        log_pi_old=torch.tensor([[-1.0], [-1.6], [-4.8], [-0.3]]),
        ret=torch.randn(4, 1),
    )
    return SimpleNamespace(model=network, entries=entries, optimizer=torch.optim.Adam(network.parameters(), lr=3e-4, eps=1e-5))


def run(s=None, ppo_ratio_clip=0.2):
    s = s or build()
    e = s.entries
    prediction = s.model(e["s"])
    pi_hat = compute_pi_hat(prediction, e["prev_o"], e["init"])
    log_pi = compute_log_pi_a(pi_hat, e["o"])
    ratio = (log_pi - e["log_pi_old"]).exp()
    obj = ratio * e["adv"]
    obj_clipped = ratio.clamp(1.0 - ppo_ratio_clip, 1.0 + ppo_ratio_clip) * e["adv"]
    policy_loss = -torch.min(obj, obj_clipped).mean()
    value_loss = 0.5 * (e["ret"] - prediction["q"].gather(1, e["o"])).pow(2).mean()
    loss = policy_loss + value_loss
    s.optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(s.model.parameters(), 0.5)
    s.optimizer.step()
    return loss
