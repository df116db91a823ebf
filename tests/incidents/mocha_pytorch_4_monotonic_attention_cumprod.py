"""MoChA-pytorch #4 - monotonic attention: the running product of (1 - p) underflows to 0 and previous_alpha / cumprod is 0/0.

Soft monotonic attention of a speech recogniser: alpha = p * cumprod * cumsum(previous_alpha / cumprod).  Once the energies are large the
stopping probability is 1 on most frames, the exclusive product of (1 - p) leaves the range of fp32 and is exactly 0.  All previous attention
sits on frame 0, so further right 0 is divided by 0.

Source: https://github.com/j-min/MoChA-pytorch/issues/4 (the reply quotes TensorFlow, which clips the product to [1e-10, 1] below the line).
Heals: clamp the product before dividing.  Tempting and no help: nan_to_num of the loss, a smaller floor inside the logarithm, clipping.
"""

from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("zero_div_zero",),
    op=("div",),
    index=(0, 5),
    masked=None,
    role=("attention",),
    fix=("clamp_denominator", "clamp_input", "representable_eps", "guard_empty"),
    variable=(None,),
    line=("alpha = p_select * cumprod_1_minus_p * torch.cumsum(previous_alpha / cumprod_1_minus_p, dim=1)",),
)


def safe_cumprod(x, eps=1e-10):
    """Cumulative product in log space."""
    return torch.exp(torch.cumsum(torch.log(torch.clamp(x, min=eps, max=1.0)), dim=1))


def exclusive_cumprod(x):
    batch_size = x.shape[0]
    one_x = torch.cat([x.new_ones(batch_size, 1), x], dim=1)[:, :-1]
    return safe_cumprod(one_x)


class MonotonicEnergy(nn.Module):
    def __init__(self, enc_dim=16, dec_dim=16, att_dim=16, init_r=-1.0):
        super().__init__()
        self.w = nn.Linear(enc_dim, att_dim, bias=False)
        self.v = nn.Linear(dec_dim, att_dim)
        self.g = nn.Parameter(torch.tensor(1.0))
        self.r = nn.Parameter(torch.tensor(init_r))
        self.out = nn.Linear(att_dim, 1, bias=False)

    def forward(self, encoder_outputs, decoder_h):
        energy = self.out(torch.tanh(self.w(encoder_outputs) + self.v(decoder_h).unsqueeze(1))).squeeze(-1)
        return self.g * energy + self.r


class MonotonicDecoder(nn.Module):
    def __init__(self, vocab=20, dim=16):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.cell = nn.GRUCell(2 * dim, dim)
        self.energy = MonotonicEnergy(dim, dim)
        self.classifier = nn.Linear(2 * dim, vocab)

    def soft(self, encoder_outputs, decoder_h, previous_alpha):
        p_select = torch.sigmoid(self.energy(encoder_outputs, decoder_h))
        cumprod_1_minus_p = exclusive_cumprod(1 - p_select)
        alpha = p_select * cumprod_1_minus_p * torch.cumsum(previous_alpha / cumprod_1_minus_p, dim=1)
        return alpha

    def forward(self, encoder_outputs, targets):
        batch, frames, dim = encoder_outputs.shape
        h = encoder_outputs.new_zeros(batch, dim)
        context = encoder_outputs.new_zeros(batch, dim)
        alpha = encoder_outputs.new_zeros(batch, frames)
        alpha[:, 0] = 1.0
        logits = []
        for step in range(targets.shape[1] - 1):
            h = self.cell(torch.cat([self.embed(targets[:, step]), context], dim=-1), h)
            alpha = self.soft(encoder_outputs, h, alpha)
            context = torch.bmm(alpha.unsqueeze(1), encoder_outputs).squeeze(1)
            logits.append(self.classifier(torch.cat([h, context], dim=-1)))
        return torch.stack(logits, dim=1)


def build():
    torch.manual_seed(4)
    model = MonotonicDecoder()
    with torch.no_grad():
        model.energy.r.fill_(40.0)  # the offset of a run that has learned to stop at once
    encoder_outputs = torch.randn(2, 12, 16)
    targets = torch.randint(0, 20, (2, 5))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    return SimpleNamespace(model=model, optimizer=optimizer, encoder_outputs=encoder_outputs, targets=targets)


def run(s=None):
    s = s or build()
    logits = s.model(s.encoder_outputs, s.targets)
    loss = F.cross_entropy(logits.flatten(0, 1), s.targets[:, 1:].flatten())
    s.optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(s.model.parameters(), 5.0)
    s.optimizer.step()
    return loss


if __name__ == "__main__":
    run()
