"""CMR (category-specific mesh reconstruction), EdgeLoss - a decimated template with a face that names one vertex twice.

After merging vertices the template holds the face (4, 4, 5). Its edge has length sqrt(0) in every prediction, the log is -inf and the distance to the mean
edge of the template inf. (Source: akanazawa/cmr, nnutils/loss_utils.py, EdgeLoss.compute_edgelength and __call__; issue 11 met the same root in
triangle_loss.) Heals: clamping the squared length to 1e-12, or adding 1e-12, under the root; dropping edges of one vertex. Does not: an epsilon on or a
clamp of the length after sqrt (loss finite, gradient 0 * inf = NaN), a larger margin, the use_l2 form.
"""

from types import SimpleNamespace

import numpy as np
import torch
from torch import nn

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("log_zero",),
    op=("log",),
    index=(0, 5),
    masked=None,
    role=("loss", "hidden"),
    fix=(
        "clamp_input",
        "representable_eps",
        "drop_invalid_sample",
        "fix_upstream",
        "mask_before_op",
        "where_on_detached",
        "stable_function",
    ),
    variable=(None,),
    line=("dist = torch.abs(torch.log(e1) - self.log_e0)",),
)


class EdgeLoss(object):
    def __init__(self, verts, edges2verts, margin=2):
        edge_verts = edges2verts[:, :, :2]
        self.indices = torch.stack([edge_verts, edge_verts, edge_verts], dim=2)
        V_copy = verts.detach().unsqueeze(0).repeat(edges2verts.size(0), 1, 1)
        e0 = self.compute_edgelength(V_copy).mean(1).view(-1, 1)
        self.log_e0 = torch.log(e0)
        self.margin = np.log(margin)
        self.zeros = torch.zeros(1)

    def __call__(self, verts):
        e1 = self.compute_edgelength(verts)
        dist = torch.abs(torch.log(e1) - self.log_e0)
        self.dist = torch.max(dist - self.margin, self.zeros)
        return self.dist.mean()

    def compute_edgelength(self, V):
        v1 = torch.gather(V, 1, self.indices[:, :, :, 0])
        v2 = torch.gather(V, 1, self.indices[:, :, :, 1])
        elengths = torch.sqrt(((v1 - v2) ** 2).sum(2))
        return elengths


class ShapePredictor(nn.Module):
    def __init__(self, feat=10, verts=8):
        super().__init__()
        self.pred_layer = nn.Linear(feat, verts * 3)
        self.pred_layer.weight.data.normal_(0, 0.01)
        self.mean_v = nn.Parameter(torch.randn(verts, 3))

    def forward(self, feat):
        delta_v = self.pred_layer(feat).view(feat.size(0), -1, 3)
        return self.mean_v + delta_v


def edges_of(faces):
    edges = []
    for a, b, c in faces:
        for i, j in ((a, b), (b, c), (a, c)):
            if (min(i, j), max(i, j)) not in edges:
                edges.append((min(i, j), max(i, j)))
    return torch.tensor(edges)


def build():
    torch.manual_seed(2)
    faces = [(0, 1, 2), (1, 2, 3), (4, 4, 5), (5, 6, 7), (0, 3, 6)]
    model = ShapePredictor()
    edges2verts = edges_of(faces)[None].repeat(3, 1, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, betas=(0.9, 0.999))
    edge_loss = EdgeLoss(model.mean_v, edges2verts)
    batch = dict(feat=torch.randn(3, 10), kp=torch.randn(3, 8, 2))
    return SimpleNamespace(model=model, optimizer=optimizer, edge_loss=edge_loss, batch=batch)


def run(s=None):
    s = s or build()
    pred_v = s.model(s.batch["feat"])
    kp_loss = nn.functional.mse_loss(pred_v[..., :2], s.batch["kp"])
    total_loss = 30.0 * kp_loss + 0.5 * s.edge_loss(pred_v)
    s.optimizer.zero_grad()
    total_loss.backward()
    s.optimizer.step()
    return total_loss


if __name__ == "__main__":
    print(run())
