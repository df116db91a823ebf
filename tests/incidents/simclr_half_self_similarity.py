"""SimCLR - exp of every similarity, the diagonal taken out afterwards, in half precision with a low temperature.

A picture's similarity with itself is 1, and exp(1 / 0.07) is 1.6 million: inf in float16. masked_select drops the diagonal, so the loss is
finite and looks well, but the backward of exp multiplies the zero gradient of the diagonal with inf, and the projection gets NaN.
Source: https://github.com/leftthomas/SimCLR/blob/master/main.py (train(): sim_matrix = exp(mm / temperature), then masked_select); the
features in half and the temperature of MoCo are the fault that was planted.
Heals: dropping the diagonal before exp, exp in float32, logsumexp / cross entropy. Does not: zeroing the diagonal of the result with where
or masked_fill, nan_to_num on the loss, clamping the sum.
"""

from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F

from expected import Expected

EXPECTED = Expected(
    phase=("backward",),
    cause=("where_grad_trap", "fp16_overflow"),
    op=("exp",),
    index=(0, 0),
    masked=True,
    role=("logits", "hidden"),
    fix=("mask_before_op", "upcast_fp32", "stable_function", "clamp_exponent"),
    variable=("sim_matrix",),
    line=("sim_matrix = torch.exp(torch.mm(out, out.t().contiguous()) / temperature)",),
)


class Model(nn.Module):
    def __init__(self, in_dim=48, feature_dim=32):
        super().__init__()
        self.f = nn.Sequential(nn.Flatten(), nn.Linear(in_dim, 32), nn.BatchNorm1d(32), nn.ReLU(inplace=True))
        self.g = nn.Sequential(nn.Linear(32, 32, bias=False), nn.BatchNorm1d(32), nn.ReLU(inplace=True), nn.Linear(32, feature_dim))

    def forward(self, x):
        feature = self.f(x)
        out = self.g(feature)
        return F.normalize(feature, dim=-1), F.normalize(out, dim=-1).half()


def nt_xent(out_1, out_2, temperature):
    batch_size = out_1.size(0)
    # [2*B, D]
    out = torch.cat([out_1, out_2], dim=0)
    # [2*B, 2*B]
    sim_matrix = torch.exp(torch.mm(out, out.t().contiguous()) / temperature)
    mask = (torch.ones_like(sim_matrix) - torch.eye(2 * batch_size)).bool()
    # [2*B, 2*B-1]
    negatives = sim_matrix.masked_select(mask).view(2 * batch_size, -1)

    pos_sim = torch.exp(torch.sum(out_1 * out_2, dim=-1) / temperature)
    # [2*B]
    pos_sim = torch.cat([pos_sim, pos_sim], dim=0)
    return (-torch.log(pos_sim.float() / negatives.float().sum(dim=-1))).mean()


def augment(images, generator):
    noise = torch.randn(images.shape, generator=generator)
    keep = (torch.rand(images.shape, generator=generator) > 0.5).float()
    return images * keep + 1.5 * noise


def build():
    torch.manual_seed(61)
    generator = torch.Generator().manual_seed(18)
    images = torch.rand(6, 3, 4, 4)
    pos_1, pos_2 = augment(images, generator), augment(images, generator)
    model = Model()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, weight_decay=1e-6)
    return SimpleNamespace(model=model, optimizer=optimizer, pos_1=pos_1, pos_2=pos_2, temperature=0.07)


def run(s=None):
    s = s or build()
    s.model.train()
    feature_1, out_1 = s.model(s.pos_1)
    feature_2, out_2 = s.model(s.pos_2)
    loss = nt_xent(out_1, out_2, s.temperature)
    s.optimizer.zero_grad()
    loss.backward()
    s.optimizer.step()
    return loss


if __name__ == "__main__":
    print(run())
