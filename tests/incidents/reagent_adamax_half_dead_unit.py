"""ReAgent discrete DQN kept in half precision, with Adamax and its default eps of 1e-8: the rows of a dead unit become NaN.

Adamax divides by max(beta2 * u, |g| + eps). In float16 the eps of 1e-8 rounds to 0, so an element whose gradient is exactly 0 since the first
step has u = 0 and the update is 0 / 0. A hidden ReLU unit that is off for the whole batch gives such a row. Loss and gradients are finite.
Source: optimizer config of https://github.com/facebookresearch/ReAgent/blob/main/reagent/optimizer/uninferrable_optimizers.py (Adamax, eps 1e-08)

Heals: an eps that float16 can hold (1e-4), or float32 parameters.
Does not: a lower learning rate, or clipping the gradient.
"""

from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F

from expected import Expected

EXPECTED = Expected(
    phase=("optimizer",),
    cause=("eps_underflow", "zero_div_zero"),
    op=("addcdiv_", "addcdiv", "div"),
    index=(7, 0),
    masked=None,
    role=("optimizer", "weights"),
    fix=("representable_eps", "upcast_fp32", "clamp_denominator"),
    variable=("q_network.0.weight", "0.weight", None),
    line=("s.optimizer.step()",),
)


class DiscreteDQN(nn.Module):
    def __init__(self, state_dim=8, num_actions=4, sizes=(24, 16)):
        super().__init__()
        self.q_network = nn.Sequential(
            nn.Linear(state_dim, sizes[0]),
            nn.ReLU(),
            nn.Linear(sizes[0], sizes[1]),
            nn.LeakyReLU(),
            nn.Linear(sizes[1], num_actions),
        )

    def forward(self, state):
        return self.q_network(state)


def build():
    torch.manual_seed(31)
    model = DiscreteDQN()
    with torch.no_grad():
        model.q_network[0].bias.fill_(1.0)
        model.q_network[0].bias[7] = -30.0  # this unit died in an earlier run
    target = DiscreteDQN()
    target.load_state_dict(model.state_dict())
    model, target = model.half(), target.half()
    n = 32
    batch = SimpleNamespace(
        state=torch.randn(n, 8).half(),
        next_state=torch.randn(n, 8).half(),
        action=torch.randint(0, 4, (n, 1)),
        reward=(2.0 * torch.randn(n)).half(),
        not_terminal=(torch.rand(n) > 0.1).half(),
    )
    optimizer = torch.optim.Adamax(model.parameters(), lr=1e-3)
    return SimpleNamespace(model=model, target=target, batch=batch, optimizer=optimizer)


def run(s=None):
    s = s or build()
    b = s.batch
    with torch.no_grad():
        next_action = s.model(b.next_state).argmax(1, keepdim=True)
        next_q = s.target(b.next_state).gather(1, next_action).squeeze(1)
        target_q = b.reward + 0.99 * b.not_terminal * next_q
    q = s.model(b.state).gather(1, b.action).squeeze(1)
    loss = F.smooth_l1_loss(q.float(), target_q.float())
    s.optimizer.zero_grad()
    loss.backward()
    s.optimizer.step()
    return loss


if __name__ == "__main__":
    run()
