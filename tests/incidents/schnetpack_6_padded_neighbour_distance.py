"""Force training of a small SchNet on molecules of unequal size: padded neighbours have distance 0.

Neighbour lists are padded with index 0 and atoms with the origin, so atom 0 gets itself as a padded neighbour: its distance is sqrt(0).  The
filter is multiplied by neighbor_mask, so the energy does not see it, but forces are the gradient of the energy with respect to the positions,
and there the masked zero meets the infinite slope of sqrt: 0 * inf = NaN forces, NaN loss, NaN weights.

Source: https://github.com/atomistic-machine-learning/schnetpack/pull/6 ("Problem were the 0-padded distances for molecules of unequal size.
When computing forces, this leads to a zero division due to the square root operation. Added the option to provide a neighbor mask").
Heals: computing the root on valid pairs only (mask or double where before sqrt), a floor under the root, a norm whose gradient at 0 is 0.
Does not: the multiplication with neighbor_mask after the filter, masking the force error by atom.
"""

from types import SimpleNamespace

import torch
from torch import nn

from expected import Expected

EXPECTED = Expected(
    phase=("backward",),
    cause=("sqrt_zero_grad",),
    op=("sqrt",),
    index=(1, 0, 2),
    masked=True,
    role=("hidden",),
    fix=("mask_before_op", "where_on_detached", "clamp_input", "stable_function", "avoid_singular_op", "fix_upstream"),
    variable=("distances",),
    line=("distances = torch.sqrt(dist_vec.pow(2).sum(-1))",),
)


def atom_distances(positions, neighbors):
    n_batch = positions.size(0)
    idx_m = torch.arange(n_batch)[:, None, None]
    dist_vec = positions[idx_m, neighbors] - positions[:, :, None, :]
    distances = torch.sqrt(dist_vec.pow(2).sum(-1))
    return distances


class TinySchNet(nn.Module):
    def __init__(self, features=12, n_gaussians=10, cutoff=4.0):
        super().__init__()
        self.embedding = nn.Embedding(10, features, padding_idx=0)
        self.filter = nn.Sequential(nn.Linear(n_gaussians, features), nn.Softplus(), nn.Linear(features, features))
        self.out = nn.Sequential(nn.Linear(features, features), nn.Softplus(), nn.Linear(features, 1))
        self.register_buffer("offsets", torch.linspace(0.0, cutoff, n_gaussians))
        self.coeff = -0.5 / float(self.offsets[1] - self.offsets[0]) ** 2

    def forward(self, inputs):
        x = self.embedding(inputs["_atomic_numbers"])
        r_ij = atom_distances(inputs["_positions"], inputs["_neighbors"])
        f_ij = torch.exp(self.coeff * (r_ij[..., None] - self.offsets) ** 2)
        W = self.filter(f_ij) * inputs["_neighbor_mask"][..., None]
        idx_m = torch.arange(x.size(0))[:, None, None]
        v = x + (x[idx_m, inputs["_neighbors"]] * W).sum(2)
        yi = self.out(v).squeeze(-1) * inputs["_atom_mask"]
        return yi.sum(1)


def build():
    torch.manual_seed(2)
    Z = torch.tensor([[8, 1, 1, 6], [7, 1, 1, 0]])
    pos = torch.randn(2, 4, 3) * 1.2
    atom_mask = (Z > 0).float()
    pos = pos * atom_mask[..., None]
    neighbors = torch.zeros(2, 4, 3, dtype=torch.long)
    neighbor_mask = torch.zeros(2, 4, 3)
    for b in range(2):
        n = int(atom_mask[b].sum())
        for i in range(n):
            others = [j for j in range(n) if j != i]
            neighbors[b, i, : len(others)] = torch.tensor(others)
            neighbor_mask[b, i, : len(others)] = 1.0
    batch = {
        "_atomic_numbers": Z,
        "_positions": pos,
        "_neighbors": neighbors,
        "_neighbor_mask": neighbor_mask,
        "_atom_mask": atom_mask,
        "energy": torch.randn(2),
        "forces": torch.randn(2, 4, 3) * atom_mask[..., None],
    }
    model = TinySchNet()
    return SimpleNamespace(model=model, optimizer=torch.optim.Adam(model.parameters(), lr=1e-3), batch=batch)


def run(s=None, rho=0.1):
    s = s or build()
    losses = []
    for _ in range(2):
        inputs = dict(s.batch)
        inputs["_positions"] = s.batch["_positions"].clone().requires_grad_()
        energy = s.model(inputs)
        dydx = torch.autograd.grad(energy.sum(), inputs["_positions"], create_graph=True)[0]
        forces = -dydx
        err_f = ((forces - inputs["forces"]) ** 2).sum() / (3 * inputs["_atom_mask"].sum())
        loss = rho * (energy - inputs["energy"]).pow(2).mean() + (1 - rho) * err_f
        s.optimizer.zero_grad()
        loss.backward()
        s.optimizer.step()
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    print(run())
