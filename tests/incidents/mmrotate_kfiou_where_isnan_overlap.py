"""KFIoU loss of a rotated detector (mmrotate 0.x and its ports): the overlap 4 * sqrt(det(Sigma)) is set to 0 where it came out NaN.

Sigma = Sigma_p - K Sigma_p is the covariance of the product of two Gaussians. For a long slanted prediction over a thin target it is the small difference
of large matrices: its determinant comes out slightly negative in float32, the root is NaN, and torch.where(isnan, 0) makes the loss finite. Backward still
runs through the root: 0 / (2 * NaN) is NaN, for all parameters of the head.
Source: https://github.com/open-mmlab/mmrotate/blob/main/mmrotate/models/losses/kf_iou_loss.py (`Vb = torch.where(torch.isnan(Vb), torch.full_like(Vb, 0), Vb)`;
the 1.x branch writes `Sigma.det().clamp(eps).sqrt()`)
Heals: clamping the determinant before the root, selecting the determinant instead of the root, or det(Sigma_p) det(Sigma_t) / det(Sigma_p + Sigma_t).
Does not: the where, a larger eps in the quotient, clamping the loss at 0, gradient clipping.
"""

from types import SimpleNamespace

import torch
from expected import Expected
from torch import nn

EXPECTED = Expected(
    phase=("backward",),
    cause=("where_grad_trap", "sqrt_negative"),
    op=("sqrt",),
    index=None,  # of two dozen slanted boxes, on each machine others round to a determinant below 0
    masked=True,
    role=("loss", "hidden"),
    fix=("clamp_input", "stable_function", "mask_before_op", "avoid_singular_op"),
    variable=(None,),
    line=("Vb = 4 * Sigma.det().sqrt()",),
)


def xy_wh_r_2_xy_sigma(xywhr):
    xy = xywhr[..., :2]
    wh = xywhr[..., 2:4].clamp(min=1e-7, max=1e7).reshape(-1, 2)
    r = xywhr[..., 4]
    cos_r, sin_r = torch.cos(r), torch.sin(r)
    R = torch.stack((cos_r, -sin_r, sin_r, cos_r), dim=-1).reshape(-1, 2, 2)
    S = 0.5 * torch.diag_embed(wh)
    return xy, R.bmm(S.square()).bmm(R.permute(0, 2, 1))


def kfld_loss(pred_decode, target_decode, fun="exp", beta=1.0 / 9.0, eps=1e-6):
    xy_p, Sigma_p = xy_wh_r_2_xy_sigma(pred_decode)
    xy_t, Sigma_t = xy_wh_r_2_xy_sigma(target_decode)
    diff = torch.abs(xy_p - xy_t) / 1000.0
    xy_loss = torch.where(diff < beta, 0.5 * diff * diff / beta, diff - 0.5 * beta).sum(dim=-1)
    Vb_p = 4 * Sigma_p.det().sqrt()
    Vb_t = 4 * Sigma_t.det().sqrt()
    K = Sigma_p.bmm((Sigma_p + Sigma_t).inverse())
    Sigma = Sigma_p - K.bmm(Sigma_p)
    Vb = 4 * Sigma.det().sqrt()
    Vb = torch.where(torch.isnan(Vb), torch.full_like(Vb, 0), Vb)
    KFIoU = Vb / (Vb_p + Vb_t - Vb + eps)
    kf_loss = torch.exp(1 - KFIoU) - 1 if fun == "exp" else 1 - KFIoU
    return (xy_loss + kf_loss).clamp(0).mean()


class RotatedHead(nn.Module):
    def __init__(self, channels=8):
        super().__init__()
        self.reg = nn.Sequential(nn.Linear(channels, 16), nn.ReLU(), nn.Linear(16, 5))

    def forward(self, feats, anchors):
        d = 0.05 * self.reg(feats)
        return torch.cat((anchors[:, :2] + d[:, :2] * anchors[:, 2:4], anchors[:, 2:4] * d[:, 2:4].exp(), anchors[:, 4:] + d[:, 4:]), dim=1)


def build():
    torch.manual_seed(4)
    head = RotatedHead()
    anchors = torch.tensor([[200.0, 200.0, 80.0, 40.0, 0.2], [420.0, 300.0, 120.0, 60.0, -0.5], [640.0, 100.0, 64.0, 64.0, 0.0]])
    targets = torch.tensor([[205.0, 196.0, 90.0, 36.0, 0.3], [410.0, 305.0, 100.0, 70.0, -0.4], [650.0, 110.0, 70.0, 50.0, 0.1]])
    slanted = torch.tensor([[512.0, 512.0, 3000.0 + 60.0 * n, 180.0 + 5.0 * n, 0.9 + 0.01 * n] for n in range(24)])
    thin = torch.tensor([[500.0, 520.0, 110.0, 0.2, -0.25]]).expand(24, 5)
    anchors, targets = torch.cat((anchors, slanted)), torch.cat((targets, thin))
    batch = {"feats": torch.randn(27, 8), "anchors": anchors, "targets": targets}
    return SimpleNamespace(model=head, optimizer=torch.optim.SGD(head.parameters(), lr=0.01, momentum=0.9), batch=batch)


def run(s=None):
    s = s or build()
    for _ in range(1):
        loss = kfld_loss(s.model(s.batch["feats"], s.batch["anchors"]), s.batch["targets"])
        s.optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(s.model.parameters(), 35.0)
        s.optimizer.step()
    return {"loss": loss.item(), "weights_finite": all(p.isfinite().all().item() for p in s.model.parameters())}


if __name__ == "__main__":
    print(run())
