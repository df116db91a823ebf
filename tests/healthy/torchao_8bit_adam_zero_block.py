"""8-bit Adam with block-wise states: a block of zeros has a scale of 0 and its codes come from 0 / 0, but the scale multiplies them away.

The quantisation keeps no floor under the block maximum. The scaled NaN is compared against the map (always false), its code is a valid
index, and the dequantised value is map[code] * 0 = 0. Rows of the embedding that no token of the batch used have such blocks.

Source: https://github.com/pytorch/ao/blob/main/torchao/optim/quant_utils.py (scale_tensor, quantize_8bit_with_qmap)
"""

from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F


def scale_tensor(x, block_size):
    blocks = x.view(-1, block_size)
    scale = blocks.abs().amax(-1)
    return (blocks / scale.view(-1, 1)).view(-1), scale


def quantize_8bit_with_qmap(x, qmap):
    codes = torch.where(x >= qmap[128], 128, 0)
    for step in (64, 32, 16, 8, 4, 2, 1):
        codes = codes + torch.where(x >= qmap[codes + step], step, 0)
    return codes.to(torch.uint8)


def dequantize(codes, scale, qmap, block_size):
    return (qmap[codes.int()].view(-1, block_size) * scale.view(-1, 1)).view(-1)


class Adam8bit(torch.optim.Optimizer):
    def __init__(self, params, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, block_size=8):
        super().__init__(params, dict(lr=lr, betas=betas, eps=eps, block_size=block_size))
        self.signed = torch.linspace(-1, 1, 256)
        self.unsigned = torch.linspace(0, 1, 256) ** 2

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            bs = group["block_size"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                st = self.state[p]
                grad = p.grad.reshape(-1)
                if not st:
                    st["step"] = 0
                    exp_avg, exp_avg_sq = torch.zeros_like(grad), torch.zeros_like(grad)
                else:
                    exp_avg = dequantize(*st["exp_avg"], self.signed, bs)
                    exp_avg_sq = dequantize(*st["exp_avg_sq"], self.unsigned, bs)
                st["step"] += 1
                exp_avg = exp_avg.lerp(grad, 1 - beta1)
                exp_avg_sq = exp_avg_sq.lerp(grad.square(), 1 - beta2)
                for name, value, qmap in (("exp_avg", exp_avg, self.signed), ("exp_avg_sq", exp_avg_sq, self.unsigned)):
                    scaled, scale = scale_tensor(value, bs)
                    st[name] = (quantize_8bit_with_qmap(scaled, qmap), scale)
                denom = (exp_avg_sq / (1 - beta2 ** st["step"])).sqrt() + group["eps"]
                p.sub_((exp_avg / (1 - beta1 ** st["step"]) / denom).view_as(p), alpha=group["lr"])


class TinyLM(nn.Module):
    def __init__(self, vocab=32, dim=16):
        super().__init__()
        self.wte = nn.Embedding(vocab, dim)
        self.fc = nn.Linear(dim, dim)
        self.head = nn.Linear(dim, vocab)

    def forward(self, ids):
        return self.head(torch.tanh(self.fc(self.wte(ids))))


def build():
    torch.manual_seed(8)
    model = TinyLM()
    ids = [torch.randint(0, 12, (2, 7)) for _ in range(3)]
    return SimpleNamespace(model=model, optimizer=Adam8bit(model.parameters()), ids=ids)


def run(s=None):
    s = s or build()
    for ids in s.ids:
        loss = F.cross_entropy(s.model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        s.optimizer.zero_grad()
        loss.backward()
        s.optimizer.step()
    return loss
