"""asteroid PR #88 (FUSS) - SNR loss where some sources are silent. The level of a silent target is log10(0) = -inf, and the loss is selected
by index for active and silent sources. Healthy: the -inf stands in a term of the target alone, which has no gradient, and is left out by
the index; the term of the estimate is finite for all sources.

https://github.com/asteroid-team/asteroid/pull/88
"""

from types import SimpleNamespace

import torch
import torch.nn as nn

EPS = 1e-8


def separation_loss(est, target, mix, active_clip=-30.0, inactive_clip=-20.0):
    silent = torch.norm(target, p=2, dim=-1) < EPS
    loss = torch.zeros(target.shape[:-1])
    target_level = 20 * torch.log10(torch.norm(target, p=2, dim=-1))
    error_level = 20 * torch.log10(torch.norm(target - est, p=2, dim=-1) + EPS)
    snr = target_level - error_level
    loss[~silent] = torch.clamp(-snr[~silent], min=active_clip)
    mix_level = 20 * torch.log10(torch.norm(mix, p=2, dim=-1) + EPS).unsqueeze(1).expand_as(loss)
    loss[silent] = torch.clamp((error_level - mix_level)[silent], min=inactive_clip)
    return loss.mean()


class Masker(nn.Module):
    def __init__(self, n_src=3, n_filters=12, kernel=8):
        super().__init__()
        self.n_src = n_src
        self.encoder = nn.Conv1d(1, n_filters, kernel, stride=kernel // 2, bias=False)
        self.masker = nn.Conv1d(n_filters, n_filters * n_src, 1)
        self.decoder = nn.ConvTranspose1d(n_filters, 1, kernel, stride=kernel // 2, bias=False)

    def forward(self, mix):
        feats = self.encoder(mix.unsqueeze(1))
        masks = torch.sigmoid(self.masker(feats)).unflatten(1, (self.n_src, -1))
        masked = masks * feats.unsqueeze(1)
        return self.decoder(masked.flatten(0, 1)).view(mix.size(0), self.n_src, -1)


def build():
    torch.manual_seed(88)
    targets = torch.randn(3, 3, 64)
    targets[0, 2] = 0.0
    targets[2, 1:] = 0.0
    model = Masker()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    return SimpleNamespace(model=model, optimizer=optimizer, targets=targets, mix=targets.sum(1))


def run(s=None):
    s = s or build()
    loss = separation_loss(s.model(s.mix), s.targets, s.mix)
    s.optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(s.model.parameters(), 5.0)
    s.optimizer.step()
    return loss


if __name__ == "__main__":
    print(run())
