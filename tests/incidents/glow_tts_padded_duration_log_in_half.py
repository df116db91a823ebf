"""Glow-TTS durations in half precision: log(1e-8 + frames) of the padded phonemes is log(0), and the mask multiplies it.

The target of the duration predictor is the log of the number of frames that the alignment gives to each phoneme. Padded phonemes have none, and
1e-8 guards them in fp32. In a half model 1e-8 + 0 is 0: the log is -inf, times a mask of 0 it is NaN, and so are the duration loss and all gradients.
Source: https://github.com/jaywalnut310/glow-tts/blob/master/models.py (FlowGenerator.forward: logw_), trained as .half().
Heals: an eps that fp16 holds, counting frames in fp32, filling the padding before the log, where in place of the product (nothing flows back here).
Does not: loss scaling, clipping.
"""

from types import SimpleNamespace

import torch
from torch import nn

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("eps_underflow", "inf_times_zero_mask", "log_zero"),
    op=("log",),
    index=(1, 0, 3),
    masked=True,
    role=("hidden", "loss"),
    fix=("representable_eps", "upcast_fp32", "mask_before_op", "clamp_input", "where_on_detached"),
    variable=(None,),
    line=("logw_ = torch.log(1e-8 + torch.sum(attn, -1)) * x_mask",),
)


def sequence_mask(lengths, max_length):
    return torch.arange(max_length)[None, :] < lengths[:, None]


class DurationPredictor(nn.Module):
    def __init__(self, channels=8):
        super().__init__()
        self.emb = nn.Embedding(20, channels)
        self.conv = nn.Conv1d(channels, channels, 3, padding=1)
        self.proj = nn.Conv1d(channels, 1, 1)

    def forward(self, ids, x_mask):
        x = self.emb(ids).transpose(1, 2)
        x = torch.relu(self.conv(x * x_mask))
        return self.proj(x * x_mask) * x_mask


def generate_path(durations, t_y):
    end = durations.cumsum(-1)
    start = end - durations
    frame = torch.arange(t_y)
    return ((frame >= start[..., None]) & (frame < end[..., None])).to(torch.float32)


def build():
    torch.manual_seed(3)
    model = DurationPredictor().half()
    x_lengths = torch.tensor([5, 3, 4])
    durations = torch.tensor([[2, 1, 3, 1, 2], [4, 2, 1, 0, 0], [1, 1, 5, 2, 0]])
    batch = dict(ids=torch.randint(1, 20, (3, 5)), x_lengths=x_lengths, attn=generate_path(durations, 9).unsqueeze(1).half())
    return SimpleNamespace(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=1e-2), batch=batch)


def run(s=None):
    s = s or build()
    x_lengths, attn = s.batch["x_lengths"], s.batch["attn"]
    for _ in range(2):
        x_mask = sequence_mask(x_lengths, s.batch["ids"].shape[1]).unsqueeze(1).to(attn.dtype)
        logw = s.model(s.batch["ids"], x_mask)
        logw_ = torch.log(1e-8 + torch.sum(attn, -1)) * x_mask
        l_length = torch.sum((logw - logw_) ** 2) / torch.sum(x_lengths)
        s.optimizer.zero_grad()
        l_length.backward()
        s.optimizer.step()
    return float(l_length.detach())


if __name__ == "__main__":
    print(run())
