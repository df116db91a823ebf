"""A memory error flips the top exponent bit of one critic weight; every value lands near 1e37 and the squared error overflows."""

from types import SimpleNamespace

import torch
import torch.nn as nn

from expected import Expected

EXPECTED = Expected(
    phase=("weights", "forward"),
    cause=("hw_bitflip", "magnitude_overflow"),
    op=("pow", "square"),
    index=(0, 0),
    masked=False,
    role=("weights", "loss"),
    fix=("fix_upstream", "reload_checkpoint", "skip_bad_step", "clamp_input"),
    variable=("score.weight", "vf_loss1"),
    line=("return self.score(hidden).squeeze(-1)", "vf_loss1 = (values - returns) ** 2"),
)


class Critic(nn.Module):
    def __init__(self, width=12):
        super().__init__()
        self.trunk = nn.Linear(6, width)
        self.mix = nn.Linear(width, width)
        self.score = nn.Linear(width, 1, bias=False)

    def forward(self, features):
        hidden = torch.tanh(self.trunk(features))
        hidden = hidden + torch.tanh(self.mix(hidden))
        return self.score(hidden).squeeze(-1)


def clipped_value_loss(values, old_values, returns, mask, cliprange=0.2):
    bounded = old_values + (values - old_values).clamp(-cliprange, cliprange)
    vf_loss1 = (values - returns) ** 2
    vf_loss2 = (bounded - returns) ** 2
    return 0.5 * (torch.max(vf_loss1, vf_loss2) * mask).sum() / mask.sum()


def build():
    torch.manual_seed(311)
    critic = Critic()
    features = torch.randn(3, 7, 6)
    with torch.no_grad():
        old_values = critic(features)
        word = critic.score.weight.data.view(torch.int32)
        word[0, 7] ^= 1 << 30
    mask = torch.ones(3, 7)
    mask[2, 5:] = 0.0
    batch = {"features": features, "old_values": old_values, "returns": old_values + 0.3 * torch.randn(3, 7), "mask": mask}
    return SimpleNamespace(model=critic, optimizer=torch.optim.AdamW(critic.parameters(), lr=1e-4), batch=batch)


def run(s=None):
    s = s or build()
    values = s.model(s.batch["features"])
    loss = clipped_value_loss(values, s.batch["old_values"], s.batch["returns"], s.batch["mask"])
    s.optimizer.zero_grad()
    loss.backward()
    s.optimizer.step()
    return loss
