"""Fast-LLM: the fused RMSNorm keeps its output instead of its input, and backward recovers x_hat as output / weight.

A linear merge of checkpoints leaves one gain of the first norm at exactly zero. Forward is fine, the loss is finite; backward computes
0 / 0 for that channel, the row mean spreads the NaN over the hidden size, and everything below the norm is lost. A sign-keeping floor
under the gain, keeping the input for backward, or nudging the zero gains of the merged checkpoint heals it. Gradient clipping does not:
the norm is NaN and takes the healthy gradients along.

Source: https://github.com/ServiceNow/Fast-LLM/issues/220 (the idea of saving the output: https://github.com/NVIDIA/apex/pull/1715)
"""

from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F

from expected import Expected

EXPECTED = Expected(
    phase=("backward",),
    cause=("zero_div_zero", "zero_denominator"),
    op=("div", "custom_backward"),
    index=(0, 5),
    masked=None,
    role=("hidden", "grad"),
    fix=("clamp_denominator", "avoid_singular_op", "fix_upstream"),
    variable=("x_hat",),
    line=("x_hat = output / weight",),
)


class FusedRMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, eps):
        inv_rms = torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
        output = x * inv_rms * weight
        ctx.save_for_backward(output, weight, inv_rms)
        return output

    @staticmethod
    def backward(ctx, grad_output):
        output, weight, inv_rms = ctx.saved_tensors
        x_hat = output / weight
        weight_grad_output = grad_output * weight
        correction = (x_hat * weight_grad_output).mean(-1, keepdim=True)
        grad_input = (weight_grad_output - x_hat * correction) * inv_rms
        return grad_input, (grad_output * x_hat).sum(0), None


class RMSNorm(nn.Module):
    def __init__(self, hidden_size, eps=1e-6):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size))
        self.eps = eps

    def forward(self, x):
        return FusedRMSNorm.apply(x.flatten(0, -2), self.weight, self.eps).view_as(x)


class Block(nn.Module):
    def __init__(self, hidden_size):
        super().__init__()
        self.norm_1 = RMSNorm(hidden_size)
        self.mlp = nn.Sequential(nn.Linear(hidden_size, 2 * hidden_size), nn.SiLU(), nn.Linear(2 * hidden_size, hidden_size))

    def forward(self, x):
        return x + self.mlp(self.norm_1(x))


class LanguageModel(nn.Module):
    def __init__(self, vocab=30, hidden_size=16, layers=2):
        super().__init__()
        self.embeddings = nn.Embedding(vocab, hidden_size)
        self.layers = nn.ModuleList(Block(hidden_size) for _ in range(layers))
        self.head = nn.Linear(hidden_size, vocab, bias=False)

    def forward(self, ids):
        h = self.embeddings(ids)
        for layer in self.layers:
            h = layer(h)
        return self.head(h)


def merge(state_dicts, coefficients):
    return {key: sum(c * sd[key] for c, sd in zip(coefficients, state_dicts)) for key in state_dicts[0]}


def build():
    torch.manual_seed(220)
    first, second = LanguageModel().state_dict(), LanguageModel().state_dict()
    first["layers.0.norm_1.weight"][5] = 0.25
    second["layers.0.norm_1.weight"][5] = -0.25
    model = LanguageModel()
    model.load_state_dict(merge([first, second], [0.5, 0.5]))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    ids = torch.randint(0, 30, (4, 11))
    return SimpleNamespace(model=model, optimizer=optimizer, ids=ids)


def run(s=None):
    s = s or build()
    logits = s.model(s.ids[:, :-1])
    loss = F.cross_entropy(logits.flatten(0, 1), s.ids[:, 1:].flatten())
    s.optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(s.model.parameters(), 1.0)
    s.optimizer.step()
    return loss
