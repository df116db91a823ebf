"""HGCN - the custom Arcosh Function in bfloat16, for an edge between two nodes at the same point.

The Function keeps its argument above 1 + 1e-7, which is exactly 1 in bfloat16. Its forward is 0 and finite, its hand-written backward is
grad / sqrt(1 * 1 - 1), and as the squared distance has a zero gradient there it is 0 / 0.
Source: https://github.com/HazyResearch/hgcn/blob/master/utils/math_utils.py (class Arcosh) with sqdist of manifolds/hyperboloid.py and the
Fermi-Dirac decoder; the bfloat16 embedding and the self loop are the fault that was planted.
Heals: an epsilon of the type's own size (finfo.eps), arcosh in float32, a floor under the square root of the backward. Does not: a clamp of
the distance after arcosh, nan_to_num on the score.
"""

from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F

from expected import Expected

EXPECTED = Expected(
    phase=("backward",),
    cause=("eps_underflow", "zero_div_zero", "sqrt_zero_grad"),
    op=("div", "Arcosh", "ArcoshBackward"),
    index=(3, 0),
    masked=None,
    role=("grad", "hidden"),
    fix=("representable_eps", "upcast_fp32", "clamp_denominator", "clamp_input"),
    variable=(None,),
    line=("return grad_output / (input**2 - 1) ** 0.5", "return Arcosh.apply(x)"),
)


class Arcosh(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        x = x.clamp(min=1 + 1e-7)
        ctx.save_for_backward(x)
        z = x.double()
        return (z + torch.sqrt(z.pow(2) - 1)).clamp_min(1e-15).log().to(x.dtype)

    @staticmethod
    def backward(ctx, grad_output):
        (input,) = ctx.saved_tensors
        return grad_output / (input**2 - 1) ** 0.5


def arcosh(x):
    return Arcosh.apply(x)


class Hyperboloid:
    """Points with -x0^2 + x1^2 + ... = -1."""

    def minkowski_dot(self, x, y):
        return (x * y).sum(dim=-1, keepdim=True) - 2 * x[..., :1] * y[..., :1]

    def expmap0(self, u):
        norm = u.norm(dim=-1, keepdim=True).clamp(min=1e-3)
        return torch.cat((torch.cosh(norm), torch.sinh(norm) * u / norm), dim=-1)

    def sqdist(self, x, y):
        theta = -self.minkowski_dot(x, y)
        return (arcosh(theta) ** 2).clamp(max=50.0)


class LinkPredictor(nn.Module):
    def __init__(self, num_nodes=10, feat=6, dim=4, r=2.0, t=1.0):
        super().__init__()
        self.manifold = Hyperboloid()
        self.encoder = nn.Sequential(nn.Linear(feat, 8), nn.Tanh(), nn.Linear(8, dim))
        self.r, self.t = r, t

    def decode(self, h, idx):
        sqdist = self.manifold.sqdist(h[idx[:, 0]], h[idx[:, 1]])
        return -(sqdist.float() - self.r) / self.t

    def forward(self, features, pos, neg):
        h = self.manifold.expmap0(self.encoder(features))
        pos_scores, neg_scores = self.decode(h, pos), self.decode(h, neg)
        loss = F.binary_cross_entropy_with_logits(pos_scores, torch.ones_like(pos_scores))
        return loss + F.binary_cross_entropy_with_logits(neg_scores, torch.zeros_like(neg_scores))


def build():
    torch.manual_seed(94)
    features = torch.randn(10, 6).bfloat16()
    features[8] = 0.0  # a node without any feature, linked with itself by the preprocessing
    pos = torch.tensor([[0, 1], [1, 2], [2, 5], [8, 8], [4, 6]])
    neg = torch.tensor([[0, 9], [3, 7], [6, 2], [5, 9]])
    model = LinkPredictor()
    with torch.no_grad():
        for layer in (model.encoder[0], model.encoder[2]):
            layer.weight.mul_(3.0)
            layer.bias.zero_()
    model = model.bfloat16()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    return SimpleNamespace(model=model, optimizer=optimizer, features=features, pos=pos, neg=neg)


def run(s=None):
    s = s or build()
    s.optimizer.zero_grad()
    loss = s.model(s.features, s.pos, s.neg)
    loss.backward()
    s.optimizer.step()
    return loss


if __name__ == "__main__":
    print(run())
