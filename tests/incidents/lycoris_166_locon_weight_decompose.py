"""LoCon with weight decomposition (DoRA) on a pruned projection: the column norm of a dead input channel is 0.

dora_scale is initialised with the column norms of the original weight and the adapter starts at zero, so for an input channel that was pruned away
numerator and denominator are both 0 in the very first forward.

Source: https://github.com/KohakuBlueleaf/LyCORIS/pull/166
Heals: the norm plus finfo.eps (the merged change), or a clamp of the norm.
Does not: a lower alpha, dropout on the adapter, gradient clipping, skipping the step (every step is bad).
"""

from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("zero_div_zero", "zero_denominator"),
    op=("div",),
    index=(0, 9),
    masked=None,
    role=("weights", "hidden"),
    fix=("clamp_denominator", "stable_function"),
    variable=("scale",),
    line=("scale = self.dora_scale / weight_norm",),
)


class LoConModule(nn.Module):
    def __init__(self, org_module, lora_dim=4, alpha=2.0):
        super().__init__()
        self.org_module = [org_module]
        out_dim, in_dim = org_module.weight.shape
        self.lora_down = nn.Linear(in_dim, lora_dim, bias=False)
        self.lora_up = nn.Linear(lora_dim, out_dim, bias=False)
        nn.init.kaiming_uniform_(self.lora_down.weight, a=5**0.5)
        nn.init.zeros_(self.lora_up.weight)
        self.scale = alpha / lora_dim
        org_weight = org_module.weight.detach().float()
        self.dora_scale = nn.Parameter(org_weight.transpose(1, 0).reshape(in_dim, -1).norm(dim=1, keepdim=True).transpose(1, 0).clone())

    def apply_weight_decompose(self, weight):
        weight = weight.to(self.dora_scale.dtype)
        weight_norm = weight.transpose(0, 1).reshape(weight.shape[1], -1).norm(dim=1, keepdim=True).transpose(0, 1)
        scale = self.dora_scale / weight_norm
        return weight * scale

    def forward(self, x):
        org = self.org_module[0]
        diff = (self.lora_up.weight @ self.lora_down.weight) * self.scale
        merged = self.apply_weight_decompose(org.weight.detach() + diff)
        return F.linear(x, merged, org.bias)


class TextEncoderMLP(nn.Module):
    def __init__(self, dim=12, hidden=16):
        super().__init__()
        self.fc1 = nn.Linear(dim, hidden).requires_grad_(False)
        self.fc2 = nn.Linear(hidden, dim).requires_grad_(False)
        with torch.no_grad():
            self.fc2.weight[:, 9] = 0.0  # structured pruning of the released checkpoint
        self.lycoris_fc1 = LoConModule(self.fc1)
        self.lycoris_fc2 = LoConModule(self.fc2)

    def forward(self, x):
        return x + self.lycoris_fc2(F.gelu(self.lycoris_fc1(x)))


def build():
    torch.manual_seed(166)
    model = TextEncoderMLP()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    batch = dict(x=torch.randn(8, 12), target=torch.randn(8, 12))
    return SimpleNamespace(model=model, optimizer=optimizer, batch=batch)


def run(s=None):
    s = s or build()
    for _ in range(2):
        s.optimizer.zero_grad()
        loss = F.mse_loss(s.model(s.batch["x"]), s.batch["target"])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(s.model.parameters(), 1.0)
        s.optimizer.step()
    return loss


if __name__ == "__main__":
    print(run())
