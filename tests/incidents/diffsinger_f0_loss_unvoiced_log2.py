"""DiffSinger pitch loss on features that an older binarizer wrote: log2(f0) was stored as it is, so unvoiced frames hold -inf. The loss is
masked to voiced frames by multiplication: (pred + inf)^2 * 0 is NaN.

https://github.com/MoonInTheRiver/DiffSinger/blob/master/tasks/tts/fs2.py (add_f0_loss), utils/pitch_utils.py (norm_f0: f0[uv > 0] = 0)
Writing a finite value into unvoiced frames before the loss heals. torch.where or nan_to_num on the finished error does not (0 * inf in backward).
"""

from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F

from expected import Expected

EXPECTED = Expected(
    phase=("input",),
    cause=("inf_times_zero_mask", "bad_input", "nan_times_zero_mask"),
    op=("input", "any"),
    index=(0, 2),
    masked=True,
    role=("hidden",),
    fix=("mask_before_op", "finite_mask_fill", "fix_upstream", "clamp_input", "drop_invalid_sample", "reject_input"),
    variable=("f0", "batch", None, 'batch["f0"]'),
    line=(
        'pitch_error = F.mse_loss(f0_pred, f0, reduction="none")',
        'f0 = batch["f0"]',
        'f0 = torch.tensor(FEATURES["f0"])',
        None,
        'add_f0_loss(s.model(batch["tokens"]), f0, uv, losses, nonpadding)',
    ),
)

INF = float("inf")
FEATURES = {  # per frame: log2(f0) and the unvoiced flag, as read from the data set on disk
    "f0": [[7.12, 7.20, -INF, 7.31, 7.28, 7.25, 7.02, 0.0], [6.80, 6.84, 6.91, 6.95, -INF, -INF, 0.0, 0.0]],
    "uv": [[0, 0, 1, 0, 0, 0, 0, 0], [0, 0, 0, 0, 1, 1, 0, 0]],
    "tokens": [[3, 3, 9, 5, 5, 6, 6, 0], [2, 2, 7, 7, 9, 9, 0, 0]],
}


class PitchPredictor(nn.Module):
    def __init__(self, vocab=12, hidden=16):
        super().__init__()
        self.embed = nn.Embedding(vocab, hidden, padding_idx=0)
        self.conv = nn.Conv1d(hidden, hidden, 3, padding=1)
        self.norm = nn.LayerNorm(hidden)
        self.linear = nn.Linear(hidden, 2)

    def forward(self, tokens):
        x = self.embed(tokens)
        x = x + F.relu(self.conv(x.transpose(1, 2))).transpose(1, 2)
        return self.linear(self.norm(x))


def add_f0_loss(p_pred, f0, uv, losses, nonpadding, lambda_uv=1.0, lambda_f0=1.0):
    uv_error = F.binary_cross_entropy_with_logits(p_pred[:, :, 1], uv, reduction="none")
    losses["uv"] = (uv_error * nonpadding).sum() / nonpadding.sum() * lambda_uv
    nonpadding = nonpadding * (uv == 0).float()
    f0_pred = p_pred[:, :, 0]
    pitch_error = F.mse_loss(f0_pred, f0, reduction="none")
    losses["f0"] = (pitch_error * nonpadding).sum() / nonpadding.sum() * lambda_f0


def build():
    torch.manual_seed(24)
    f0 = torch.tensor(FEATURES["f0"])
    batch = {"f0": f0, "uv": torch.tensor(FEATURES["uv"]).float(), "tokens": torch.tensor(FEATURES["tokens"])}
    model = PitchPredictor()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.98))
    return SimpleNamespace(model=model, optimizer=optimizer, batch=batch)


def run(s=None):
    s = s or build()
    batch = s.batch
    f0 = batch["f0"]
    uv = batch["uv"]
    nonpadding = (batch["tokens"] != 0).float()
    losses = {}
    add_f0_loss(s.model(batch["tokens"]), f0, uv, losses, nonpadding)
    loss = sum(losses.values())
    s.optimizer.zero_grad()
    loss.backward()
    s.optimizer.step()
    return loss


if __name__ == "__main__":
    print(run())
