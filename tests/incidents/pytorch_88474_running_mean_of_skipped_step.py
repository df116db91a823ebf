"""PyTorch #88474 - GradScaler skips the overflowed step, the batch-norm buffers keep it.

An audio encoder is trained under fp16 autocast. One clip of the first batch was stored as raw 16-bit PCM, so the convolution over it passes
65504 and comes out inf; the loss of that step is NaN, GradScaler sees it and skips the update, every weight stays fine. But the batch norm has
already folded the bad batch into `running_mean` / `running_var`. The next stage freezes the batch norm (`eval()`), and from then on the loss of
perfectly clean batches is NaN and every further step is skipped.

Source: https://github.com/pytorch/pytorch/issues/88474 (also #90342, #115500).

Heals: run the convolution in fp32 (the overflow is gone), normalise the clip to [-1, 1] like all others, or leave the clip out. Does not heal:
GradScaler (it is here already), `self.bn(h.float())` (the value is inf before the norm sees it), a smaller learning rate.
"""

from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("fp16_overflow",),
    op=("conv1d", "convolution"),
    index=(2, 0, 0),
    masked=False,
    role=("hidden",),
    fix=("upcast_fp32", "clamp_input", "drop_invalid_sample", "reject_input", "fix_upstream"),
    variable=("h",),
    line=("h = self.conv(waveform)",),
)


class Encoder(nn.Module):
    def __init__(self, channels=6, classes=4):
        super().__init__()
        self.conv = nn.Conv1d(1, channels, kernel_size=5, stride=2, padding=2)
        self.bn = nn.BatchNorm1d(channels)
        self.head = nn.Linear(channels, classes)

    def forward(self, waveform):
        h = self.conv(waveform)
        h = F.relu(self.bn(h))
        return self.head(h.mean(dim=-1))


def freeze_batch_norm(model):
    for module in model.modules():
        if isinstance(module, nn.BatchNorm1d):
            module.eval()


def build():
    torch.manual_seed(2101)
    model = Encoder()
    with torch.no_grad():
        model.conv.weight.mul_(8.0)  # a trained front end: the gain of its filters is well above 1
    batches = []
    for _ in range(2):
        waveform = torch.rand(5, 1, 24) * 2 - 1
        batches.append((waveform, torch.randint(0, 4, (5,))))
    batches[0][0][2] *= 2**15  # PCM_16 that was never divided by its full scale
    return SimpleNamespace(
        model=model,
        batches=batches,
        scaler=torch.amp.GradScaler("cpu", init_scale=2.0**10),
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3),
        losses=[],
    )


def train_step(s, waveform, labels):
    s.optimizer.zero_grad(set_to_none=True)
    with torch.autocast("cpu", dtype=torch.float16):
        logits = s.model(waveform)
    loss = F.cross_entropy(logits.float(), labels)
    s.scaler.scale(loss).backward()
    s.scaler.step(s.optimizer)
    s.scaler.update()
    s.losses.append(loss.detach())
    return loss


def run(s=None):
    s = s or build()
    s.model.train()
    train_step(s, *s.batches[0])
    freeze_batch_norm(s.model)  # second stage: statistics are taken as learned
    return train_step(s, *s.batches[1])


if __name__ == "__main__":
    print(run())
