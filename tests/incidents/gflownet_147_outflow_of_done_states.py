"""alexhernandezgarcia/gflownet #147 - flow matching after -1000 was replaced by -inf for the logits of invalid actions.

The flow that leaves a finished state is its reward alone, and the code removes the policy's out-flow by multiplying with logical_not(done). A
finished state has no valid action, so with -inf in the place of -1000 its log out-flow is -inf and -inf * 0 is NaN: the flow matching loss is
NaN as soon as the batch holds one finished trajectory.
Source: https://github.com/alexhernandezgarcia/gflownet/pull/147 ("... would have made the code crash due to nan losses")

Heals: split the loss into terminating and intermediate states (what the PR does), select with where, or keep the finite fill of -1000.
Does not: clamp the rewards before their logarithm, or clip gradients.
"""

from types import SimpleNamespace

import torch
import torch.nn as nn

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("inf_times_zero_mask", "fully_masked_softmax"),
    op=("logsumexp", "mul"),
    index=(2,),
    masked=True,
    role=("logits", "log_probs", "hidden"),
    fix=("mask_before_op", "finite_mask_fill", "where_on_detached", "guard_empty", "drop_invalid_sample"),
    variable=("outflow", None),
    line=("outflow = torch.logsumexp(logits, dim=1)", "outflow = outflow * torch.logical_not(done) + log_rewards * done"),
)

GRID = 4  # states are cells of a GRID x GRID board; actions: right, down, stop
LOG_INF = float("inf")


class FlowPolicy(nn.Module):
    def __init__(self, n_actions=3, width=32):
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(2 * GRID, width), nn.LeakyReLU(), nn.Linear(width, n_actions))

    def forward(self, cells):
        return self.mlp(nn.functional.one_hot(cells, GRID).flatten(1).float())


def invalid_actions(cells, done):
    mask = torch.zeros(len(cells), 3, dtype=torch.bool)
    mask[:, :2] = cells == GRID - 1
    mask[done] = True
    return mask


def parents_of(cells, done):
    parents, actions, of = [], [], []
    for i, (cell, fin) in enumerate(zip(cells.tolist(), done.tolist())):
        if fin:
            parents.append(cell), actions.append(2), of.append(i)
            continue
        for a in (0, 1):
            if cell[a] > 0:
                parents.append([c - (j == a) for j, c in enumerate(cell)]), actions.append(a), of.append(i)
    return torch.tensor(parents), torch.tensor(actions), torch.tensor(of)


def flowmatch_loss(policy, cells, done, log_rewards):
    parents, actions, of = parents_of(cells, done)
    inflow_logits = torch.full((len(cells), 3), -LOG_INF)
    inflow_logits[of, actions] = policy(parents)[torch.arange(len(of)), actions]
    inflow = torch.logsumexp(inflow_logits, dim=1)
    logits = policy(cells).masked_fill(invalid_actions(cells, done), -LOG_INF)
    outflow = torch.logsumexp(logits, dim=1)
    outflow = outflow * torch.logical_not(done) + log_rewards * done
    return (inflow - outflow).pow(2).mean()


def build():
    torch.manual_seed(147)
    model = FlowPolicy()
    cells = torch.tensor([[1, 0], [1, 1], [1, 1], [0, 2], [3, 2], [3, 2]])
    done = torch.tensor([False, False, True, False, False, True])
    log_rewards = torch.log(0.1 + 0.5 * (cells.float().mean(1) > 1.5))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    return SimpleNamespace(model=model, optimizer=optimizer, cells=cells, done=done, log_rewards=log_rewards)


def run(s=None):
    s = s or build()
    loss = flowmatch_loss(s.model, s.cells, s.done, s.log_rewards)
    s.optimizer.zero_grad()
    loss.backward()
    s.optimizer.step()
    return loss


if __name__ == "__main__":
    run()
