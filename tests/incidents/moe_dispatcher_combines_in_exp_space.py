"""Sparsely gated mixture of experts (davidmrau/mixture-of-experts, copied into many adapters): SparseDispatcher.combine leaves log space.

The dispatcher takes the experts' outputs for logarithms: it exponentiates them, adds them up weighted by the gates and takes the logarithm, with an
epsilon for zeros. In an adapter they are ordinary activations: one massive channel of one token reaches 96, exp(96) is inf, its logarithm is inf, and
the layer norm behind it makes NaN of the row.
Source: https://github.com/davidmrau/mixture-of-experts/blob/master/moe.py (SparseDispatcher.combine, versions with .exp() and combined.log())
Heals: a log-sum-exp with the gates as weights, or combining without exp and log. Does not: the epsilon for zeros, a float32 cast of the sum, gradient clipping.
"""

from types import SimpleNamespace

import numpy as np
import torch
import torch.nn.functional as F
from expected import Expected
from torch import nn

EXPECTED = Expected(
    phase=("forward",),
    cause=("exp_overflow",),
    op=("exp",),
    index=(5, 5),
    masked=None,
    role=("hidden",),
    fix=("stable_function", "clamp_exponent", "clamp_input"),
    variable=("stitched",),
    line=("stitched = torch.cat(expert_out, 0).exp()",),
)


class SparseDispatcher:
    def __init__(self, num_experts, gates):
        self._gates = gates
        sorted_experts, index_sorted_experts = torch.nonzero(gates).sort(0)
        _, self._expert_index = sorted_experts.split(1, dim=1)
        self._batch_index = torch.nonzero(gates)[index_sorted_experts[:, 1], 0]
        self._part_sizes = (gates > 0).sum(0).tolist()
        self._nonzero_gates = torch.gather(gates[self._batch_index.flatten()], 1, self._expert_index)

    def dispatch(self, inp):
        return torch.split(inp[self._batch_index], self._part_sizes, dim=0)

    def combine(self, expert_out, multiply_by_gates=True):
        stitched = torch.cat(expert_out, 0).exp()
        if multiply_by_gates:
            stitched = stitched.mul(self._nonzero_gates)
        zeros = torch.zeros(self._gates.size(0), expert_out[-1].size(1))
        combined = zeros.index_add(0, self._batch_index, stitched.float())
        combined[combined == 0] = np.finfo(float).eps
        return combined.log()


class MoEAdapter(nn.Module):
    def __init__(self, width=12, num_experts=4, k=2):
        super().__init__()
        self.num_experts, self.k = num_experts, k
        self.w_gate = nn.Parameter(0.3 * torch.randn(width, num_experts))
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(width, 24), nn.ReLU(), nn.Linear(24, width)) for _ in range(num_experts))

    def forward(self, x):
        top_logits, top_indices = (x @ self.w_gate).topk(self.k, dim=1)
        gates = torch.zeros(len(x), self.num_experts).scatter(1, top_indices, top_logits.softmax(1))
        dispatcher = SparseDispatcher(self.num_experts, gates)
        expert_out = [expert(part) for expert, part in zip(self.experts, dispatcher.dispatch(x))]
        return dispatcher.combine(expert_out)


class Policy(nn.Module):
    def __init__(self, vocab=40, width=12):
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.adapter = MoEAdapter(width)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab)

    def forward(self, ids):
        hidden = self.embed(ids.flatten())
        return self.head(self.norm(hidden + self.adapter(hidden))).view(*ids.shape, -1)


def build():
    torch.manual_seed(2)
    model = Policy()
    with torch.no_grad():
        model.adapter.experts[1][2].weight[5] *= 7.0  # a massive channel, as trained transformers have them
        model.embed.weight[39] *= 45.0  # the attention sink token
    ids = torch.randint(0, 38, (2, 9))
    ids[1, 3] = 39
    batch = {"ids": ids, "advantages": torch.tensor([0.7, -0.5])}
    return SimpleNamespace(model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3), batch=batch)


def run(s=None):
    s = s or build()
    ids = s.batch["ids"]
    log_probs = F.log_softmax(s.model(ids[:, :-1]), -1).gather(-1, ids[:, 1:, None]).squeeze(-1)
    loss = -(s.batch["advantages"][:, None] * log_probs).mean()
    s.optimizer.zero_grad()
    loss.backward()
    s.optimizer.step()
    return {"loss": loss.item(), "weights_finite": all(p.isfinite().all().item() for p in s.model.parameters())}


if __name__ == "__main__":
    print(run())
