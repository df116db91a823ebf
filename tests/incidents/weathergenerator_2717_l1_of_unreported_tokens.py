"""WeatherGenerator PR #2717, masked L1 loss between student and teacher latents - excluded tokens are multiplied away.

The batch brings NaN for the stations that did not report. The loss mask leaves their tokens out, but _masked_l1_loss_per_sample multiplies by the mask and NaN * 0 is NaN; the weight of the
embedding gets 0 * NaN as well. (Source: ecmwf/WeatherGenerator PR #2717, _masked_l1_loss_per_sample.) Heals: filling the tokens before both networks read them (nan_to_num, torch.where(reported, tokens, 0));
leaving out the samples with such stations. Does not: torch.where(mask, per_token_loss, 0) alone (the PR: the loss is finite, the student's gradient is not, as it reads these tokens too),
nan_to_num of the token losses, clipping the gradient norm.
"""

from types import SimpleNamespace

import torch
from torch import nn

from expected import Expected

EXPECTED = Expected(
    phase=("input",),
    cause=("nan_times_zero_mask", "bad_input"),
    op=("input",),
    index=(1, 2, 0),
    masked=True,
    role=("hidden",),
    fix=("mask_before_op", "fix_upstream", "drop_invalid_sample"),
    variable=("tokens",),
    line=('source = torch.where(s.batch["hidden"].unsqueeze(-1), s.model.mask_token, s.batch["tokens"])', 'tokens[1, 2:4] = float("nan")'),
)


class TokenEmbed(nn.Module):
    def __init__(self, n_in=3, dim=8):
        super().__init__()
        self.mask_token = nn.Parameter(torch.zeros(n_in))
        self.embed = nn.Linear(n_in, dim)
        self.ffn = nn.Sequential(nn.GELU(), nn.Linear(dim, dim))

    def forward(self, x):
        x = self.embed(x)
        return x + self.ffn(x)


def _masked_l1_loss_per_sample(pred, target, mask):
    per_token_loss = (pred - target).abs().mean(dim=-1)
    mask = mask.float()
    per_token_loss = per_token_loss * mask
    return per_token_loss.sum(dim=-1) / mask.sum(dim=-1).clamp(min=1.0)


def build():
    torch.manual_seed(13)
    tokens = torch.randn(3, 6, 3)
    tokens[1, 2:4] = float("nan")
    tokens[2, 5] = float("nan")
    reported = ~tokens.isnan().any(dim=-1)
    hidden = torch.tensor([[1, 0, 1, 0, 1, 1], [1, 1, 0, 0, 0, 1], [0, 1, 1, 0, 1, 0]], dtype=torch.bool)
    student, teacher = TokenEmbed(), TokenEmbed()
    teacher.load_state_dict(student.state_dict())
    teacher.requires_grad_(False)
    optimizer = torch.optim.AdamW(student.parameters(), lr=1e-3)
    batch = {"tokens": tokens, "hidden": hidden, "loss_mask": hidden & reported}
    return SimpleNamespace(model=student, teacher=teacher, optimizer=optimizer, batch=batch)


def run(s=None):
    s = s or build()
    source = torch.where(s.batch["hidden"].unsqueeze(-1), s.model.mask_token, s.batch["tokens"])
    preds = s.model(source)
    with torch.no_grad():
        targets = s.teacher(s.batch["tokens"])
    loss = _masked_l1_loss_per_sample(preds, targets, s.batch["loss_mask"]).mean()
    s.optimizer.zero_grad()
    loss.backward()
    s.optimizer.step()
    return loss


if __name__ == "__main__":
    print(run())
