"""PEFT LoftQ initialisation - a block of the base weight is all zero (a pruned head), so its absmax is 0 and weight / absmax is 0 / 0 = NaN. The
NaN goes into argmin, which answers some valid code, and the code is multiplied by the absmax 0: the block comes back as zeros. Healthy.

https://github.com/huggingface/peft (src/peft/utils/loftq_utils.py, NFQuantizer.quantize_block / dequantize_block, loftq_init).
"""

from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F


class NFQuantizer:
    def __init__(self, num_bits=4, block_size=16):
        self.block_size = block_size
        probs = torch.linspace(0.03, 0.97, 2**num_bits)
        table = torch.erfinv(2 * probs - 1)
        self.norm_lookup_table = table / table.abs().max()

    def quantize_block(self, weight):
        weight_block = weight.reshape(-1, self.block_size)
        weight_max = weight_block.abs().max(dim=-1)[0].unsqueeze(-1)
        weight_divabs = (weight_block / weight_max).unsqueeze(-1)
        abs_diff = (weight_divabs - self.norm_lookup_table.reshape(1, -1)).abs()
        qweight = torch.argmin(abs_diff, dim=-1)
        return qweight, weight_max, weight.shape

    def dequantize_block(self, qweight, weight_max, weight_shape):
        return (self.norm_lookup_table[qweight] * weight_max).reshape(weight_shape)


@torch.no_grad()
def loftq_init(weight, rank, num_iter=2):
    quantizer = NFQuantizer()
    residual = weight.clone()
    for _ in range(num_iter):
        dequantized = quantizer.dequantize_block(*quantizer.quantize_block(residual))
        u, sing, vh = torch.linalg.svd(weight - dequantized, full_matrices=False)
        lora_b = u[:, :rank] * sing[:rank].sqrt()
        lora_a = sing[:rank].sqrt().unsqueeze(1) * vh[:rank]
        residual = weight - lora_b @ lora_a
        residual[weight == 0] = 0.0  # pruned weights stay pruned in the base
    return dequantized, lora_a, lora_b


class LoftQLinear(nn.Module):
    def __init__(self, weight, rank=4, lora_alpha=4):
        super().__init__()
        base, lora_a, lora_b = loftq_init(weight, rank)
        self.register_buffer("weight", base)
        self.lora_A = nn.Parameter(lora_a)
        self.lora_B = nn.Parameter(lora_b)
        self.scaling = lora_alpha / rank

    def forward(self, x):
        return F.linear(x, self.weight) + self.scaling * F.linear(F.linear(x, self.lora_A), self.lora_B)


class Adapted(nn.Module):
    def __init__(self, vocab=24, dim=32):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim).requires_grad_(False)
        weight = torch.randn(dim, dim) / dim**0.5
        weight[8:12] = 0.0  # a pruned head: whole blocks of zeros
        self.o_proj = LoftQLinear(weight)
        self.lm_head = nn.Linear(dim, vocab, bias=False)

    def forward(self, input_ids):
        hidden = self.embed(input_ids)
        return self.lm_head(hidden + torch.tanh(self.o_proj(hidden)))


def build():
    torch.manual_seed(17)
    model = Adapted()
    input_ids = torch.randint(0, 24, (3, 9))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    return SimpleNamespace(model=model, optimizer=optimizer, input_ids=input_ids)


def run(s=None):
    s = s or build()
    logits = s.model(s.input_ids[:, :-1])
    loss = F.cross_entropy(logits.flatten(0, 1), s.input_ids[:, 1:].flatten())
    s.optimizer.zero_grad()
    loss.backward()
    s.optimizer.step()
    return loss


if __name__ == "__main__":
    print("loss", run().item())
