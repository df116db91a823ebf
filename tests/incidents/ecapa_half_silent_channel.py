"""Speaker embedding in half precision: the floor of 1e-9 under the variance of the attentive pooling rounds to 0, a channel that stays
silent has variance 0, and the gradient of its standard deviation is infinite. The loss is finite.
Style of lawlict/ECAPA-TDNN, ecapa_tdnn.py, AttentiveStatsPool.

Checked by hand: a floor of 1e-4 heals, and so does pooling in fp32 with the floor as it is. Adding 1e-9 to the variance instead of clamping
changes nothing, and neither does replacing a NaN in the embedding: there is none.
"""

from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F

from expected import Expected

EXPECTED = Expected(
    phase=("backward",),
    cause=("eps_underflow", "sqrt_zero_grad"),
    op=("sqrt", "clamp"),
    index=(0, 3),
    masked=None,
    role=("hidden",),
    fix=("representable_eps", "upcast_fp32", "clamp_input"),
    variable=("std", None),
    line=("std = torch.sqrt(residuals.clamp(min=1e-9))",),
)


class AttentiveStatsPool(nn.Module):
    def __init__(self, in_dim, bottleneck_dim):
        super().__init__()
        self.linear1 = nn.Conv1d(in_dim, bottleneck_dim, kernel_size=1)
        self.linear2 = nn.Conv1d(bottleneck_dim, in_dim, kernel_size=1)

    def forward(self, x):
        alpha = torch.tanh(self.linear1(x))
        alpha = torch.softmax(self.linear2(alpha), dim=2)
        mean = torch.sum(alpha * x, dim=2)
        residuals = torch.sum(alpha * x**2, dim=2) - mean**2
        std = torch.sqrt(residuals.clamp(min=1e-9))
        return torch.cat([mean, std], dim=1)


class SpeakerNet(nn.Module):
    def __init__(self, mels=10, channels=8, emb=6, speakers=5):
        super().__init__()
        self.layer1 = nn.Conv1d(mels, channels, kernel_size=5, padding=2)
        self.conv = nn.Conv1d(channels, channels, kernel_size=1)
        self.pooling = AttentiveStatsPool(channels, 4)
        self.linear = nn.Linear(2 * channels, emb)
        self.head = nn.Linear(emb, speakers, bias=False)

    def forward(self, feats):
        x = F.relu(self.layer1(feats.transpose(1, 2)))
        x = F.relu(self.conv(x))
        return self.head(self.linear(self.pooling(x)))


def build():
    torch.manual_seed(2005)
    net = SpeakerNet()
    with torch.no_grad():
        net.conv.bias.fill_(0.3)
        net.conv.bias[3] = -6.0  # this channel has died
    feats = torch.randn(4, 20, 10)
    return SimpleNamespace(
        model=net.half(),
        optimizer=torch.optim.SGD(net.parameters(), lr=0.01),
        batch=(feats.half(), torch.randint(0, 5, (4,))),
    )


def run(s=None):
    s = s or build()
    feats, speakers = s.batch
    loss = F.cross_entropy(s.model(feats).float(), speakers)
    s.optimizer.zero_grad()
    loss.backward()
    s.optimizer.step()
    return loss
