"""Domain adaptation in half precision: the target sensor delivers counts and not reflectances, squared distances between the two domains
pass 65504, and the kernel divides inf by an infinite bandwidth.
Style of ZongxianLee/MMD_Loss.Pytorch, mmd_loss.py, guassian_kernel and forward.

Checked by hand: the distances in fp32 heal; so do target inputs in the unit of the source. nan_to_num on the kernel values gives a finite
loss and NaN gradients; clamping the distances at 65504 leaves the bandwidth infinite, so every kernel is 1 and the term teaches nothing.
"""

from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("fp16_overflow",),
    op=("sum",),
    index=(0, 5),
    masked=None,
    role=("hidden", "loss"),
    fix=("upcast_fp32", "clamp_input"),
    variable=("L2_distance",),
    line=("L2_distance = ((total0 - total1) ** 2).sum(2)",),
)


class MMD_loss(nn.Module):
    def __init__(self, kernel_mul=2.0, kernel_num=5):
        super().__init__()
        self.kernel_mul, self.kernel_num, self.fix_sigma = kernel_mul, kernel_num, None

    def guassian_kernel(self, source, target):
        n_samples = source.size(0) + target.size(0)
        total = torch.cat([source, target], dim=0)
        total0 = total.unsqueeze(0).expand(n_samples, n_samples, -1)
        total1 = total.unsqueeze(1).expand(n_samples, n_samples, -1)
        L2_distance = ((total0 - total1) ** 2).sum(2)
        if self.fix_sigma:
            bandwidth = self.fix_sigma
        else:
            bandwidth = torch.sum(L2_distance.detach()) / (n_samples**2 - n_samples)
        bandwidth = bandwidth / self.kernel_mul ** (self.kernel_num // 2)
        bandwidth_list = [bandwidth * (self.kernel_mul**i) for i in range(self.kernel_num)]
        kernel_val = [torch.exp(-L2_distance / bandwidth_temp) for bandwidth_temp in bandwidth_list]
        return sum(kernel_val)

    def forward(self, source, target):
        batch_size = source.size(0)
        kernels = self.guassian_kernel(source, target)
        XX = kernels[:batch_size, :batch_size]
        YY = kernels[batch_size:, batch_size:]
        XY = kernels[:batch_size, batch_size:]
        YX = kernels[batch_size:, :batch_size]
        return torch.mean(XX + YY - XY - YX)


class TransferNet(nn.Module):
    def __init__(self, bands=12, bottleneck=16, classes=4):
        super().__init__()
        self.bottleneck = nn.Sequential(nn.Linear(bands, bottleneck), nn.ReLU())
        self.classifier = nn.Linear(bottleneck, classes)

    def forward(self, source, target):
        source, target = self.bottleneck(source), self.bottleneck(target)
        return self.classifier(source), source, target


def build():
    torch.manual_seed(702)
    model = TransferNet().half()
    base = torch.rand(1, 12)
    source = (base + 0.1 * torch.randn(5, 12)).clamp(0, 1)
    target = ((base + 0.1 * torch.randn(5, 12)).clamp(0, 1) * 255.0).round()
    return SimpleNamespace(
        model=model,
        transfer=MMD_loss(),
        optimizer=torch.optim.SGD(model.parameters(), lr=1e-2),
        batch=dict(source=source.half(), target=target.half(), labels=torch.randint(0, 4, (5,))),
    )


def run(s=None):
    s = s or build()
    logits, source, target = s.model(s.batch["source"], s.batch["target"])
    loss = F.cross_entropy(logits.float(), s.batch["labels"]) + 0.5 * s.transfer(source, target)
    s.optimizer.zero_grad()
    loss.backward()
    s.optimizer.step()
    return loss
