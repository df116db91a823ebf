"""Source separation with an SI-SDR loss; one target channel of the batch is digital silence.

SI-SDR scales the target by the projection of the estimate on it, alpha = <x, y> / <y, y>.  The vocals of item 1 do not sing in this excerpt:
the channel is all zeros, its mean is 0, both sums are 0 and alpha is 0/0 = NaN.  The eps of the loss stands in the log and in the other
quotient, not in this one.

Source: https://github.com/csteinmetz1/auraloss/issues/25 ("When the target y is a vector of zeros we get a NaN for the loss").
Heals: eps in the denominator of alpha, or leaving silent channels out.  Does not: a larger eps in the logarithm, gradient clipping.
"""

from types import SimpleNamespace

import torch
from torch import nn

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("zero_div_zero",),
    op=("div",),
    index=(1, 0),
    masked=None,
    role=("hidden", "loss"),
    fix=("clamp_denominator", "drop_invalid_sample", "where_on_detached", "reject_input"),
    variable=("alpha",),
    line=("alpha = (input * target).sum(-1) / (target**2).sum(-1)",),
)


class SISDRLoss(nn.Module):
    def __init__(self, zero_mean=True, eps=1e-8):
        super().__init__()
        self.zero_mean = zero_mean
        self.eps = eps

    def forward(self, input, target):
        if self.zero_mean:
            input = input - input.mean(dim=-1, keepdim=True)
            target = target - target.mean(dim=-1, keepdim=True)
        alpha = (input * target).sum(-1) / (target**2).sum(-1)
        target = target * alpha.unsqueeze(-1)
        res = input - target
        losses = 10 * torch.log10((target**2).sum(-1) / ((res**2).sum(-1) + self.eps) + self.eps)
        return -losses.mean()


class Separator(nn.Module):
    def __init__(self, sources=2, channels=8):
        super().__init__()
        self.encoder = nn.Conv1d(1, channels, 9, padding=4)
        self.masker = nn.Conv1d(channels, channels * sources, 1)
        self.decoder = nn.Conv1d(channels * sources, sources, 9, padding=4, groups=sources)

    def forward(self, mix):
        h = torch.relu(self.encoder(mix))
        m = torch.sigmoid(self.masker(h))
        return self.decoder(m * h.repeat(1, 2, 1))


def build():
    torch.manual_seed(5)
    stems = torch.randn(3, 2, 160) * 0.3
    stems[1, 0] = 0.0
    model = Separator()
    return SimpleNamespace(
        model=model,
        optimizer=torch.optim.Adam(model.parameters(), lr=1e-3),
        batch={"mix": stems.sum(1, keepdim=True), "stems": stems},
        criterion=SISDRLoss(),
    )


def run(s=None):
    s = s or build()
    out = []
    for _ in range(2):
        est = s.model(s.batch["mix"])
        loss = s.criterion(est, s.batch["stems"])
        s.optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(s.model.parameters(), 5.0)
        s.optimizer.step()
        out.append(loss.item())
    return out


if __name__ == "__main__":
    print(run())
