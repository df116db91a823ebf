"""DGN (graph convolutional reinforcement learning) in float16: an agent that has died has no neighbour, not even itself.

Attention between agents is masked by `scores * mask - 9e15 * (1 - mask)`. In float32 the row of a dead agent is -9e15 everywhere and its softmax is
harmlessly uniform. The Q network was cast to half: 9e15 is beyond 65504, the row is -inf everywhere and its softmax NaN. The Q values of all agents
are in the TD loss, and the next attention layer multiplies the NaN by a mask of 0 besides.

Source: https://github.com/jiechuanjiang/pytorch_DGN (AttModel in Surviving/DGN.py and Routing)
Heals: a fill that float16 can hold (-1e4); a softmax that gives 0 to a row without keys; attention scores in float32.
Does not: clipping gradients, scaling the loss, dividing the scores by sqrt(d), masking the dead agent's TD error by a product.
"""

from types import SimpleNamespace

import torch
from torch import nn
from torch.nn import functional as F

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("fully_masked_softmax", "fp16_overflow"),
    op=("softmax", "mul"),
    index=(1, 0, 0),
    masked=False,
    role=("attention",),
    fix=("finite_mask_fill", "safe_softmax", "upcast_fp32", "fix_upstream"),
    variable=("att", None),
    line=("att = F.softmax(torch.mul(torch.bmm(q, k), mask) - 9e15 * (1 - mask), dim=2)",),
)


class AttModel(nn.Module):
    def __init__(self, din: int, hidden: int):
        super().__init__()
        self.fcv = nn.Linear(din, hidden)
        self.fck = nn.Linear(din, hidden)
        self.fcq = nn.Linear(din, hidden)
        self.fcout = nn.Linear(hidden, hidden)

    def forward(self, x, mask):
        v = F.relu(self.fcv(x))
        q = F.relu(self.fcq(x))
        k = F.relu(self.fck(x)).permute(0, 2, 1)
        att = F.softmax(torch.mul(torch.bmm(q, k), mask) - 9e15 * (1 - mask), dim=2)
        return F.relu(self.fcout(torch.bmm(att, v)))


class DGN(nn.Module):
    def __init__(self, obs: int, hidden: int, actions: int):
        super().__init__()
        self.encoder = nn.Linear(obs, hidden)
        self.att_1 = AttModel(hidden, hidden)
        self.att_2 = AttModel(hidden, hidden)
        self.q_net = nn.Linear(hidden, actions)

    def forward(self, x, mask):
        h1 = F.relu(self.encoder(x))
        h2 = self.att_1(h1, mask)
        h3 = self.att_2(h2, mask)
        return self.q_net(h1 + h2 + h3)


def build():
    torch.manual_seed(21)
    model = DGN(10, 16, 5).half()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    adjacency = torch.ones(3, 4, 4)
    adjacency[1, 0, :] = 0
    adjacency[1, :, 0] = 0
    adjacency[2, 1, 3] = adjacency[2, 3, 1] = 0
    batch = {
        "obs": torch.randn(3, 4, 10).half(),
        "adjacency": adjacency.half(),
        "action": torch.randint(0, 5, (3, 4)),
        "target": torch.randn(3, 4),
    }
    return SimpleNamespace(model=model, optimizer=optimizer, batch=batch)


def run(s=None):
    s = s or build()
    losses = []
    for _ in range(2):
        s.optimizer.zero_grad()
        q_values = s.model(s.batch["obs"], s.batch["adjacency"])
        taken = q_values.gather(2, s.batch["action"][..., None]).squeeze(-1)
        loss = (taken.float() - s.batch["target"]).pow(2).mean()
        loss.backward()
        s.optimizer.step()
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    print(run())
