"""E(n) network as an interatomic potential - the distance of every atom to itself is in the matrix that is differentiated.

The energy sums a pair term over a full N x N matrix of distances and zeroes the diagonal afterwards. The forces are torch.func.grad of the
energy, and the derivative of sqrt at 0 times the zero of the mask is NaN: the energy is finite, every force is NaN, and so is the loss of
force matching.
Source: https://github.com/vgsatorras/egnn/blob/main/models/egnn_clean/egnn_clean.py (coord2radial: sqrt(radial), over edges i != j); the
dense matrix with its diagonal, and sqrt without detach, are the fault that was planted.
Heals: the pairs i != j only, or a 1 on the diagonal before sqrt. Does not: the mask on the result (it is there), where on the distances
after sqrt, nan_to_num on the energy.
"""

from types import SimpleNamespace

import torch
import torch.nn as nn
from torch.func import grad_and_value

from expected import Expected

EXPECTED = Expected(
    phase=("forward", "backward"),
    cause=("sqrt_zero_grad", "where_grad_trap"),
    op=("sqrt", "div"),
    index=(0, 0, 0, 0),
    masked=True,
    role=("hidden", "grad"),
    fix=("mask_before_op", "avoid_singular_op", "clamp_input", "stable_function"),
    variable=("norm", None),
    line=("norm = torch.sqrt(radial)", "gradient, (_, energy) = grad_and_value(total, has_aux=True)(coord)"),
)


class PairPotential(nn.Module):
    def __init__(self, species=3, hidden=16, cutoff=4.0):
        super().__init__()
        self.species = nn.Embedding(species, 4)
        self.edge_mlp = nn.Sequential(nn.Linear(2 * 4 + 1, hidden), nn.SiLU(), nn.Linear(hidden, hidden), nn.SiLU())
        self.readout = nn.Linear(hidden, 1)
        self.cutoff = cutoff

    def coord2radial(self, coord):
        coord_diff = coord[:, :, None] - coord[:, None]
        radial = (coord_diff**2).sum(-1, keepdim=True)
        norm = torch.sqrt(radial)
        return norm

    def forward(self, coord, z):
        n = coord.size(1)
        norm = self.coord2radial(coord)
        h = self.species(z)
        source, target = h[:, :, None].expand(-1, -1, n, -1), h[:, None].expand(-1, n, -1, -1)
        edge = self.edge_mlp(torch.cat((source, target, norm), dim=-1))
        pair_energy = self.readout(edge) * torch.exp(-norm / self.cutoff)

        off_diagonal = (1 - torch.eye(n, dtype=coord.dtype))[None, :, :, None]
        return 0.5 * (pair_energy * off_diagonal).sum(dim=(1, 2, 3))


def energy_and_forces(model, coord, z):
    def total(c):
        energy = model(c, z)
        return energy.sum(), energy

    gradient, (_, energy) = grad_and_value(total, has_aux=True)(coord)
    return energy, -gradient


def build():
    torch.manual_seed(61)
    model = PairPotential().double()
    grid = torch.cartesian_prod(*[torch.arange(2.0)] * 3)[:6] * 1.4
    coord = (grid + 0.1 * torch.randn(3, 6, 3)).double()
    z = torch.randint(0, 3, (3, 6))
    energy = torch.randn(3).double()
    forces = torch.randn(3, 6, 3).double()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    return SimpleNamespace(model=model, optimizer=optimizer, coord=coord, z=z, energy=energy, forces=forces, rho=0.99)


def run(s=None):
    s = s or build()
    energy, forces = energy_and_forces(s.model, s.coord, s.z)
    loss_e = (energy - s.energy).pow(2).mean()
    loss_f = (forces - s.forces).pow(2).mean()
    loss = (1 - s.rho) * loss_e + s.rho * loss_f
    s.optimizer.zero_grad()
    loss.backward()
    s.optimizer.step()
    return loss


if __name__ == "__main__":
    print(run())
