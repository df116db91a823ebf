"""makeMoE noisy top-k router: the gates that were not chosen are -inf before the softmax and an expert may get no token at all. Healthy: every
row keeps top_k finite gates, softmax turns -inf into 0 with a gradient of 0, and an idle expert only has no gradient.

https://github.com/AviSoori1x/makeMoE (NoisyTopkRouter, SparseMoE)
"""

from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F


class NoisyTopkRouter(nn.Module):
    def __init__(self, n_embed, num_experts, top_k):
        super().__init__()
        self.top_k = top_k
        self.topkroute_linear = nn.Linear(n_embed, num_experts)
        self.noise_linear = nn.Linear(n_embed, num_experts)

    def forward(self, x):
        logits = self.topkroute_linear(x)
        noise = torch.randn_like(logits) * F.softplus(self.noise_linear(x))
        noisy_logits = logits + noise
        top_k_logits, indices = noisy_logits.topk(self.top_k, dim=-1)
        sparse_logits = torch.full_like(noisy_logits, float("-inf")).scatter(-1, indices, top_k_logits)
        return F.softmax(sparse_logits, dim=-1), indices


class SparseMoE(nn.Module):
    def __init__(self, n_embed=8, num_experts=6, top_k=2):
        super().__init__()
        self.router = NoisyTopkRouter(n_embed, num_experts, top_k)
        self.experts = nn.ModuleList([nn.Sequential(nn.Linear(n_embed, 16), nn.ReLU(), nn.Linear(16, n_embed)) for _ in range(num_experts)])

    def forward(self, x):
        gating, indices = self.router(x)
        flat_x, flat_gating = x.flatten(0, 1), gating.flatten(0, 1)
        out = torch.zeros_like(flat_x)
        for i, expert in enumerate(self.experts):
            chosen = (indices == i).any(dim=-1).flatten()
            if chosen.any():
                out[chosen] = out[chosen] + expert(flat_x[chosen]) * flat_gating[chosen, i].unsqueeze(1)
        return out.view_as(x)


def build():
    torch.manual_seed(6)
    model = SparseMoE()
    with torch.no_grad():
        model.router.topkroute_linear.bias[5] = -60.0  # nobody is sent to the last expert
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return SimpleNamespace(model=model, optimizer=optimizer, x=torch.randn(2, 5, 8), y=torch.randn(2, 5, 8))


def run(s=None):
    s = s or build()
    for _ in range(2):
        loss = F.mse_loss(s.x + s.model(s.x), s.y)
        s.optimizer.zero_grad()
        loss.backward()
        s.optimizer.step()
    return loss


if __name__ == "__main__":
    print(run())
