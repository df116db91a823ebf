"""P-DQN, inverting gradients - one parameter of a hybrid action was frozen by giving it the same lower and upper bound.

The gradient of Q with respect to the continuous action parameters is scaled by the share of its range that is still free:
(max - value) / range upwards, (value - min) / range downwards. "kick power" was pinned to 1 by setting min = max = 1; its range is 0 and the share is
+-inf. The scaled gradient goes into the surrogate -(delta * action_params) and from there into the whole actor.

Source: https://github.com/cycraig/MP-DQN/blob/master/agents/pdqn.py (_invert_gradients, the update of actor_param)
Heals: refusing (or dropping) a parameter without range; leaving its column out of the inversion and giving it a gradient of 0.
Does not: clipping the gradient norm (inf / inf), the zeroing of other actions' gradients, an eps of 1e-8 in the range (1e8 times the gradient
drowns every other parameter's).
"""

from types import SimpleNamespace

import torch
from torch import nn
from torch.nn import functional as F

from expected import Expected

EXPECTED = Expected(
    phase=("forward", "backward"),
    cause=("zero_denominator",),
    op=("div",),
    index=(0, 2),
    masked=False,
    role=("grad", "hidden"),
    fix=("validate_config", "skip_disabled_term", "mask_before_op", "where_on_detached"),
    variable=("up",),
    line=("up = (max_p - vals) / rnge",),
)


class QActor(nn.Module):
    def __init__(self, state: int, params: int, actions: int):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(state + params, 32), nn.ReLU(), nn.Linear(32, actions))

    def forward(self, state, params):
        return self.net(torch.cat([state, params], dim=1))


class ParamActor(nn.Module):
    def __init__(self, state: int, params: int):
        super().__init__()
        self.hidden = nn.Linear(state, 32)
        self.out = nn.Linear(32, params)
        self.passthrough = nn.Linear(state, params)

    def forward(self, state):
        return self.out(F.relu(self.hidden(state))) * 0.1 + self.passthrough(state) * 0.1


@torch.no_grad()
def invert_gradients(grad, vals, min_p, max_p):
    rnge = max_p - min_p
    up = (max_p - vals) / rnge
    down = (vals - min_p) / rnge
    return grad * torch.where(grad > 0, up, down)


def build():
    torch.manual_seed(12)
    actor, actor_param = QActor(6, 4, 3), ParamActor(6, 4)
    model = nn.ModuleDict({"q": actor, "param": actor_param})
    optimizer = torch.optim.Adam(actor_param.parameters(), lr=1e-4)
    batch = {
        "state": torch.randn(8, 6),
        "min": torch.tensor([-1.0, -1.0, 1.0, -1.0]),
        "max": torch.tensor([1.0, 1.0, 1.0, 1.0]),
    }
    return SimpleNamespace(model=model, optimizer=optimizer, batch=batch)


def run(s=None):
    s = s or build()
    actor, actor_param, b = s.model["q"], s.model["param"], s.batch
    losses = []
    for _ in range(2):
        with torch.no_grad():
            action_params = actor_param(b["state"])
        action_params.requires_grad_()
        q_loss = actor(b["state"], action_params).sum(dim=1).mean()
        actor.zero_grad()
        q_loss.backward()
        delta_a = action_params.grad.clone()

        action_params = actor_param(b["state"])
        delta_a = invert_gradients(delta_a, action_params, b["min"], b["max"])
        out = -torch.mul(delta_a, action_params)
        actor_param.zero_grad()
        out.backward(torch.ones_like(out))
        torch.nn.utils.clip_grad_norm_(actor_param.parameters(), 10.0)
        s.optimizer.step()
        losses.append(out.sum().item())
    return losses


if __name__ == "__main__":
    print(run())
