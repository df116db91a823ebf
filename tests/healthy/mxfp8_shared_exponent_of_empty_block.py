"""Healthy. MXFP8 quantisation-aware tuning of a LoRA adapter: the shared exponent of a block of zeros is floor(log2(0)) = -inf.

The exponent of a block is log2 of its largest magnitude, cut to what e8m0 can hold, [-127, 127]. Blocks of zeros (lora_B at its start, a pruned
head of the base matrix) get -inf from the logarithm, -127 from the clamp, a scale of 2 ** -127, and 0 / 2 ** -127 is 0. All of it stands in
the forward of a straight-through Function, so no derivative of log2 or of the quotient is ever formed.
Source: https://github.com/microsoft/microxcaling (mx/mx_ops.py, _shared_exponents, which adds the smallest normal number instead).
"""

from types import SimpleNamespace

import torch
from torch import nn
import torch.nn.functional as F


def quantize_mx(w, block=16, emax=8):
    blocks = w.unflatten(-1, (-1, block))
    shared_exp = torch.floor(torch.log2(blocks.abs().amax(-1, keepdim=True))) - emax
    shared_exp = shared_exp.clamp(-127.0, 127.0)
    scale = torch.exp2(shared_exp)
    q = (blocks / scale).clamp(-448.0, 448.0).to(torch.float8_e4m3fn).float()
    return (q * scale).flatten(-2)


class MXQuantize(torch.autograd.Function):
    @staticmethod
    def forward(ctx, w):
        return quantize_mx(w)

    @staticmethod
    def backward(ctx, grad_output):
        return grad_output


class LoRALinear(nn.Module):
    def __init__(self, dim_in, dim_out, rank=16):
        super().__init__()
        self.base = nn.Linear(dim_in, dim_out, bias=False).requires_grad_(False)
        self.lora_A = nn.Parameter(torch.randn(rank, dim_in) / dim_in**0.5)
        self.lora_B = nn.Parameter(torch.zeros(dim_out, rank))
        with torch.no_grad():
            self.base.weight[:, 16:32] = 0.0  # a pruned head

    def forward(self, x):
        y = F.linear(x, MXQuantize.apply(self.base.weight))
        return y + F.linear(F.linear(x, MXQuantize.apply(self.lora_A)), MXQuantize.apply(self.lora_B))


class Policy(nn.Module):
    def __init__(self, vocab=40, dim=48):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim).requires_grad_(False)
        self.proj = LoRALinear(dim, dim)
        self.head = nn.Linear(dim, vocab).requires_grad_(False)

    def forward(self, ids):
        return self.head(torch.tanh(self.proj(self.embed(ids))))


def build():
    torch.manual_seed(3)
    model = Policy()
    ids = torch.randint(0, 40, (4, 9))
    with torch.no_grad():
        old = F.log_softmax(model(ids[:, :-1]), -1).gather(-1, ids[:, 1:, None]).squeeze(-1)
    batch = dict(ids=ids, old_log_probs=old, advantages=torch.tensor([0.9, -0.7, 0.4, -0.6]))
    params = [p for p in model.parameters() if p.requires_grad]
    return SimpleNamespace(model=model, optimizer=torch.optim.AdamW(params, lr=1e-3), batch=batch)


def run(s=None):
    s = s or build()
    losses = []
    for _ in range(3):
        s.optimizer.zero_grad()
        ids = s.batch["ids"]
        log_probs = F.log_softmax(s.model(ids[:, :-1]), -1).gather(-1, ids[:, 1:, None]).squeeze(-1)
        ratio = torch.exp(log_probs - s.batch["old_log_probs"])
        adv = s.batch["advantages"][:, None]
        loss = -torch.min(ratio * adv, ratio.clamp(0.8, 1.2) * adv).mean()
        loss.backward()
        nn.utils.clip_grad_norm_([p for p in s.model.parameters() if p.requires_grad], 1.0)
        s.optimizer.step()
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    print(run())
