"""Healthy: LLM.int8() base under LoRA; the rows of the padded vocabulary are zeros and their row statistic is 0.

round(A * 127 / 0) is NaN for such a row, and a NaN has no integer: the cast leaves some int8.  The row is dequantised with the same statistic, 0, so
whatever the integer was, the weight is 0 again, as it should be.  The quantiser runs once, in the first forward, under no_grad.

Source: int8_vectorwise_quant / int8_vectorwise_dequant of https://github.com/bitsandbytes-foundation/bitsandbytes (backend in plain torch).  Healthy.
"""

from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F

VOCAB, PADDED, HIDDEN = 30, 32, 16


def int8_vectorwise_quant(A):
    row_stats = A.abs().amax(dim=1).float()
    out_row = torch.round(A.mul(127.0) / row_stats.unsqueeze(-1)).to(torch.int8)
    return out_row, row_stats


def int8_vectorwise_dequant(A, stats):
    return A * stats.view(-1, 1) * 7.874015718698502e-3


class Linear8bitLt(nn.Module):
    def __init__(self, base, rank=4):
        super().__init__()
        self.register_buffer("weight", base.weight.detach().half())
        self.CB = self.SCB = None
        self.lora_A = nn.Parameter(torch.randn(rank, base.in_features) * 0.1)
        self.lora_B = nn.Parameter(torch.zeros(base.out_features, rank))

    @torch.no_grad()
    def init_8bit_state(self):
        self.CB, self.SCB = int8_vectorwise_quant(self.weight)
        del self.weight

    def forward(self, x):
        if self.CB is None:
            self.init_8bit_state()
        weight = int8_vectorwise_dequant(self.CB, self.SCB)
        return F.linear(x, weight) + F.linear(F.linear(x, self.lora_A), self.lora_B)


class CausalLM(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(PADDED, HIDDEN)
        lm_head = nn.Linear(HIDDEN, PADDED, bias=False)
        with torch.no_grad():
            lm_head.weight[VOCAB:] = 0.0
        self.proj = Linear8bitLt(nn.Linear(HIDDEN, HIDDEN, bias=False))
        self.lm_head = Linear8bitLt(lm_head)

    def forward(self, tokens):
        return self.lm_head(torch.tanh(self.proj(self.embed(tokens))))


def build():
    torch.manual_seed(8)
    model = CausalLM()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return SimpleNamespace(model=model, optimizer=optimizer, batch=torch.randint(0, VOCAB, (3, 8)))


def run(s=None):
    s = s or build()
    for _ in range(3):
        s.optimizer.zero_grad()
        loss = F.cross_entropy(s.model(s.batch[:, :-1]).flatten(0, 1), s.batch[:, 1:].flatten())
        loss.backward()
        s.optimizer.step()
    return loss


if __name__ == "__main__":
    print(run())
