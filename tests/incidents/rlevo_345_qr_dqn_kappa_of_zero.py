"""rlevo #345 / #889 - QR-DQN with kappa = 0, which the config admits and which is meant as "pure quantile regression".

The Huber term of every non-zero TD error is kappa * (|u| - kappa / 2) = 0 and the loss then divides by kappa: 0 / 0 in every pair of
quantiles. Source: https://github.com/anthonytorlucci/rlevo/issues/345 (fixed by https://github.com/anthonytorlucci/rlevo/pull/889), formula
of https://github.com/toshikwa/fqf-iqn-qrdqn.pytorch (fqf_iqn_qrdqn/utils.py). Rejecting the setting, a small positive kappa or the plain
absolute error for kappa = 0 heal; clipping the TD errors or the gradients does not.
"""

from types import SimpleNamespace

import torch
import torch.nn as nn

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("zero_div_zero", "zero_denominator"),
    op=("div", "truediv"),
    index=(0, 0, 0),
    masked=None,
    role=("loss",),
    fix=("validate_config", "avoid_singular_op", "clamp_denominator", "stable_function"),
    variable=("quantile_huber_loss",),
    line=("quantile_huber_loss = element_wise_quantile_loss / kappa",),
)


class QuantileNet(nn.Module):
    def __init__(self, state_dim=6, num_actions=3, num_quantiles=5):
        super().__init__()
        self.num_actions, self.num_quantiles = num_actions, num_quantiles
        self.body = nn.Sequential(nn.Linear(state_dim, 32), nn.ReLU())
        self.head = nn.Linear(32, num_actions * num_quantiles)

    def forward(self, states):
        return self.head(self.body(states)).view(-1, self.num_quantiles, self.num_actions)


def evaluate_quantile_at_action(quantiles, actions):
    index = actions[:, None, None].expand(-1, quantiles.shape[1], 1)
    return quantiles.gather(2, index)


def calculate_huber_loss(td_errors, kappa):
    return torch.where(td_errors.abs() <= kappa, 0.5 * td_errors.pow(2), kappa * (td_errors.abs() - 0.5 * kappa))


def calculate_quantile_huber_loss(td_errors, taus, weights, kappa):
    element_wise_huber_loss = calculate_huber_loss(td_errors, kappa)
    asymmetry = torch.abs(taus[..., None] - (td_errors.detach() < 0).float())
    element_wise_quantile_loss = asymmetry * element_wise_huber_loss
    quantile_huber_loss = element_wise_quantile_loss / kappa
    batch_quantile_huber_loss = quantile_huber_loss.sum(dim=1).mean(dim=1, keepdim=True)
    return (batch_quantile_huber_loss * weights).mean()


def build():
    torch.manual_seed(7)
    config = SimpleNamespace(gamma=0.99, kappa=0.0, lr=5e-5)
    model = QuantileNet()
    target = QuantileNet()
    target.load_state_dict(model.state_dict())
    batch = SimpleNamespace(
        states=torch.randn(4, 6),
        actions=torch.tensor([0, 2, 1, 1]),
        rewards=torch.tensor([[0.0], [1.0], [0.0], [-1.0]]),
        next_states=torch.randn(4, 6),
        dones=torch.tensor([[0.0], [0.0], [1.0], [0.0]]),
        weights=torch.ones(4, 1),
    )
    taus = ((torch.arange(5) + 0.5) / 5)[None, :]
    return SimpleNamespace(
        model=model,
        target=target,
        config=config,
        batch=batch,
        taus=taus,
        optimizer=torch.optim.Adam(model.parameters(), lr=config.lr, eps=1e-2 / 32),
    )


def run(s=None):
    s = s or build()
    b = s.batch
    current_sa_quantiles = evaluate_quantile_at_action(s.model(b.states), b.actions)
    with torch.no_grad():
        next_actions = s.target(b.next_states).mean(dim=1).argmax(dim=1)
        next_sa_quantiles = evaluate_quantile_at_action(s.target(b.next_states), next_actions).transpose(1, 2)
        target_sa_quantiles = b.rewards[..., None] + (1.0 - b.dones[..., None]) * s.config.gamma * next_sa_quantiles
    td_errors = target_sa_quantiles - current_sa_quantiles
    loss = calculate_quantile_huber_loss(td_errors, s.taus, b.weights, s.config.kappa)
    s.optimizer.zero_grad()
    loss.backward()
    s.optimizer.step()
    return loss
