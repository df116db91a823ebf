"""Looks broken, is healthy: one fp16 step overflows, the scaler skips it, and the batch-norm buffers are put back.

The first batch holds a clip at full integer scale; its convolution is inf in fp16, the loss of that step is NaN. GradScaler finds the bad gradients
and leaves the weights alone, and because the running statistics were copied before the step and are restored when it is skipped, nothing of the bad
batch stays. The next batches train as usual.

Source: https://github.com/pytorch/pytorch/issues/90342 (the work-around in the thread)
"""

from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F


class Encoder(nn.Module):
    def __init__(self, channels=6, classes=3):
        super().__init__()
        self.conv = nn.Conv1d(1, channels, kernel_size=5, padding=2)
        self.bn = nn.BatchNorm1d(channels)
        self.head = nn.Linear(channels, classes)

    def forward(self, x):
        return self.head(F.relu(self.bn(self.conv(x))).mean(dim=-1))


def build():
    torch.manual_seed(2114)
    model = Encoder()
    with torch.no_grad():
        model.conv.weight.mul_(8.0)
    waveforms = torch.rand(3, 4, 1, 20) * 2 - 1
    waveforms[0, 1] *= 2**15
    return SimpleNamespace(
        model=model,
        waveforms=waveforms,
        labels=torch.randint(0, 3, (3, 4)),
        scaler=torch.amp.GradScaler("cpu", init_scale=2.0**12),
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3),
        skipped=0,
    )


def run(s=None):
    s = s or build()
    s.model.train()
    for waveform, labels in zip(s.waveforms, s.labels):
        kept = {name: buffer.clone() for name, buffer in s.model.named_buffers()}
        s.optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cpu", dtype=torch.float16):
            logits = s.model(waveform)
        loss = F.cross_entropy(logits.float(), labels)
        s.scaler.scale(loss).backward()
        scale = s.scaler.get_scale()
        s.scaler.step(s.optimizer)
        s.scaler.update()
        if s.scaler.get_scale() < scale:
            s.skipped += 1
            for name, buffer in s.model.named_buffers():
                buffer.copy_(kept[name])
    s.model.eval()
    with torch.no_grad():
        s.accuracy = (s.model(s.waveforms[2]).argmax(-1) == s.labels[2]).float().mean()
    return loss


if __name__ == "__main__":
    print(run())
