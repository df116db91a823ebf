"""coach #357 / pytorch-ddpg-naf - NAF exponentiates the whole matrix and then keeps the diagonal by a product with a mask.

An entry below the diagonal is unbounded and has grown to about 95 for one state; exp of it is inf, and the diagonal mask turns it into
inf * 0 = NaN although nothing ever wanted that exponential. Source: https://github.com/IntelLabs/coach/issues/357 (NAF outputs NaN actions
after the loss has grown), formula of https://github.com/ikostrikov/pytorch-ddpg-naf (naf.py). Taking the exponential of the diagonal only,
or clamping before it, heals; a torch.where after the exponential repairs the loss and leaves NaN gradients.
"""

from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("inf_times_zero_mask", "exp_overflow"),
    op=("exp",),
    index=(4, 2, 0),
    masked=True,
    role=("hidden",),
    fix=("mask_before_op", "clamp_exponent", "clamp_input", "finite_mask_fill"),
    variable=("scale",),
    line=("scale = torch.exp(L)",),
)


class Policy(nn.Module):
    def __init__(self, hidden_size=32, num_inputs=5, num_outputs=3):
        super().__init__()
        self.linear1 = nn.Linear(num_inputs, hidden_size)
        self.linear2 = nn.Linear(hidden_size, hidden_size)
        self.V = nn.Linear(hidden_size, 1)
        self.mu = nn.Linear(hidden_size, num_outputs)
        self.L = nn.Linear(hidden_size, num_outputs**2)
        self.register_buffer("tril_mask", torch.tril(torch.ones(num_outputs, num_outputs), diagonal=-1).unsqueeze(0))
        self.register_buffer("diag_mask", torch.eye(num_outputs).unsqueeze(0))

    def forward(self, inputs, u=None):
        x = torch.tanh(self.linear1(inputs))
        x = torch.tanh(self.linear2(x))
        V = self.V(x)
        mu = torch.tanh(self.mu(x))
        Q = None
        if u is not None:
            num_outputs = mu.size(1)
            L = self.L(x).view(-1, num_outputs, num_outputs)
            scale = torch.exp(L)
            L = L * self.tril_mask.expand_as(L) + scale * self.diag_mask.expand_as(L)
            P = torch.bmm(L, L.transpose(2, 1))
            u_mu = (u - mu).unsqueeze(2)
            A = -0.5 * torch.bmm(torch.bmm(u_mu.transpose(2, 1), P), u_mu)[:, :, 0]
            Q = A + V
        return mu, Q, V


def build():
    torch.manual_seed(357)
    model = Policy()
    state = torch.randn(8, 5)
    with torch.no_grad():  # what the long run has made of the head: the torque coupling of two joints in one kind of state
        features = torch.tanh(model.linear2(torch.tanh(model.linear1(state))))
        model.L.weight[6] += (95.0 - model.L(features)[4, 6]) * features[4] / features[4].square().sum()
    target_model = Policy()
    target_model.load_state_dict(model.state_dict())
    batch = SimpleNamespace(
        state=state, action=torch.rand(8, 3) * 2 - 1, reward=torch.randn(8, 1), mask=torch.ones(8, 1), next_state=torch.randn(8, 5)
    )
    return SimpleNamespace(
        model=model, target_model=target_model, batch=batch, gamma=0.99, optimizer=torch.optim.Adam(model.parameters(), lr=1e-3)
    )


def run(s=None):
    s = s or build()
    b = s.batch
    with torch.no_grad():
        _, _, next_state_values = s.target_model(b.next_state)
        expected_state_action_values = b.reward + s.gamma * b.mask * next_state_values
    _, state_action_values, _ = s.model(b.state, b.action)
    loss = F.mse_loss(state_action_values, expected_state_action_values)
    s.optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(s.model.parameters(), 1.0)
    s.optimizer.step()
    return loss
