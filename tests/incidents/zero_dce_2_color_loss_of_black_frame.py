"""Zero-DCE_extension #2 - the colour constancy loss takes the square root of the spread of the channel means.

One training image is a black frame. Its enhanced version is black whatever the curve maps are, the three channel means are equal, and the
root stands at 0: the loss is finite, its gradient is inf * 0, and the curve network becomes NaN in this step. (The thread: "torch.pow(xx
+xx+xx, 0.5) is used ... not derivable when x=0".) Heals: a floor inside the root, or no root. Does not heal: nan_to_num on the loss.

https://github.com/Li-Chongyi/Zero-DCE_extension/issues/2
"""

from types import SimpleNamespace

import torch
import torch.nn as nn
from expected import Expected

EXPECTED = Expected(
    phase=("backward",),
    cause=("sqrt_zero_grad",),
    op=("pow", "sqrt"),
    index=(2, 0, 0, 0),
    masked=None,
    role=("loss", "hidden", "grad"),
    fix=(
        "clamp_input",
        "avoid_singular_op",
        "representable_eps",
        "clamp_denominator",
        "drop_invalid_sample",
        "where_on_detached",
        "mask_before_op",
        "stable_function",
    ),
    variable=("k", None),
    line=("k = torch.pow(torch.pow(Drg, 2) + torch.pow(Drb, 2) + torch.pow(Dgb, 2), 0.5)",),
)


class L_color(nn.Module):
    def forward(self, x):
        mean_rgb = torch.mean(x, [2, 3], keepdim=True)
        mr, mg, mb = torch.split(mean_rgb, 1, dim=1)
        Drg = torch.pow(mr - mg, 2)
        Drb = torch.pow(mr - mb, 2)
        Dgb = torch.pow(mb - mg, 2)
        k = torch.pow(torch.pow(Drg, 2) + torch.pow(Drb, 2) + torch.pow(Dgb, 2), 0.5)
        return k


class L_exp(nn.Module):
    def __init__(self, patch_size):
        super().__init__()
        self.pool = nn.AvgPool2d(patch_size)

    def forward(self, x, mean_val):
        mean = self.pool(torch.mean(x, 1, keepdim=True))
        return torch.mean(torch.pow(mean - mean_val, 2))


class EnhanceNet(nn.Module):
    def __init__(self, number_f=8):
        super().__init__()
        self.e_conv1 = nn.Conv2d(3, number_f, 3, 1, 1)
        self.e_conv2 = nn.Conv2d(number_f, 3, 3, 1, 1)

    def forward(self, x):
        x_r = torch.tanh(self.e_conv2(torch.relu(self.e_conv1(x))))
        for _ in range(4):
            x = x + x_r * (torch.pow(x, 2) - x)
        return x, x_r


def build():
    torch.manual_seed(2)
    model = EnhanceNet()
    img_lowlight = 0.3 * torch.rand(4, 3, 16, 16)
    img_lowlight[2] = 0.0  # a fade to black in the video
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4, weight_decay=1e-4)
    return SimpleNamespace(model=model, optimizer=optimizer, img_lowlight=img_lowlight, L_color=L_color(), L_exp=L_exp(4))


def run(s=None):
    s = s or build()
    enhanced_image, A = s.model(s.img_lowlight)
    loss_TV = 1600 * (torch.pow(A[:, :, 1:] - A[:, :, :-1], 2).mean() + torch.pow(A[..., 1:] - A[..., :-1], 2).mean())
    loss_col = 5 * torch.mean(s.L_color(enhanced_image))
    loss_exp = 10 * s.L_exp(enhanced_image, 0.6)
    loss = loss_TV + loss_col + loss_exp
    s.optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(s.model.parameters(), 0.1)
    s.optimizer.step()
    return loss
