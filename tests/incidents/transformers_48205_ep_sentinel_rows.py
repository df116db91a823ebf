"""Expert-parallel MoE layer: rows of a grouped GEMM that belong to another rank are never written, and the router's gradient reads them.

Tokens are sorted by local expert; slots routed to experts of another rank form a tail ("sentinel") behind offs[-1]. The grouped GEMM
allocates its output with new_empty and writes only the rows of its own experts. The combine step multiplies by the routing weight and sets
the tail to zero afterwards, so the loss is finite; but the derivative of the product with respect to the routing weight is
grad * out = 0 * garbage, and the garbage is NaN. Memory is filled as torch.use_deterministic_algorithms fills it (a run with reproducibility on).
Source: https://github.com/huggingface/transformers/pull/48205 and the reproduction in https://github.com/huggingface/transformers/pull/45621
Heals: zero-initialised output; masking the tail before the product. Does not: masking after the product, clamping the weights, skipping steps.
"""

from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import nn

from expected import Expected

EXPECTED = Expected(
    phase=("backward",),
    cause=("uninitialized", "where_grad_trap"),
    op=("new_empty", "empty", "empty_like", "GroupedMM"),
    index=None,
    masked=True,
    role=("hidden",),
    fix=("initialise_memory", "mask_before_op", "where_on_detached"),
    variable=("out", "proj_out"),
    line=("out = x.new_empty(x.shape[0], weight.shape[-1])", "proj_out = GroupedMM.apply(F.silu(selected), self.down_proj, offs)"),
)


class GroupedMM(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, offs):
        out = x.new_empty(x.shape[0], weight.shape[-1])
        start = 0
        for e, end in enumerate(offs):
            out[start:end] = x[start:end] @ weight[e]
            start = end
        ctx.save_for_backward(x, weight)
        ctx.offs = offs
        return out

    @staticmethod
    def backward(ctx, grad_out):
        x, weight = ctx.saved_tensors
        d_x, d_w = torch.zeros_like(x), torch.zeros_like(weight)
        start = 0
        for e, end in enumerate(ctx.offs):
            d_x[start:end] = grad_out[start:end] @ weight[e].T
            d_w[e] = x[start:end].T @ grad_out[start:end]
            start = end
        return d_x, d_w, None


class ExpertParallelMoe(nn.Module):
    def __init__(self, hidden=8, num_experts=4, num_local=2, top_k=2):
        super().__init__()
        self.router = nn.Linear(hidden, num_experts, bias=False)
        self.down_proj = nn.Parameter(torch.randn(num_local, hidden, hidden) * 0.3)
        self.num_local, self.top_k = num_local, top_k

    def forward(self, hidden_states):
        probs = self.router(hidden_states).softmax(-1)
        top_w, top_i = probs.topk(self.top_k, dim=-1)
        expert_ids = top_i.reshape(-1)
        token_idx = torch.arange(hidden_states.shape[0]).repeat_interleave(self.top_k)
        local_ids = torch.where(expert_ids < self.num_local, expert_ids, torch.full_like(expert_ids, self.num_local))
        order = torch.argsort(local_ids, stable=True)
        offs = torch.bincount(local_ids, minlength=self.num_local + 1)[: self.num_local].cumsum(0).tolist()
        sentinel = local_ids[order] == self.num_local
        selected = hidden_states[token_idx[order]]
        sample_weights = top_w.reshape(-1)[order]
        proj_out = GroupedMM.apply(F.silu(selected), self.down_proj, offs)
        weighted = proj_out * sample_weights.unsqueeze(-1)
        weighted = weighted.masked_fill(sentinel.unsqueeze(-1), 0.0)
        combined = torch.zeros_like(hidden_states)
        return combined.index_add(0, token_idx[order], weighted)


class Policy(nn.Module):
    def __init__(self, vocab=17, hidden=8):
        super().__init__()
        self.embed = nn.Embedding(vocab, hidden)
        self.moe = ExpertParallelMoe(hidden)
        self.lm_head = nn.Linear(hidden, vocab, bias=False)

    def forward(self, ids):
        h = self.embed(ids)
        h = h + self.moe(h.reshape(-1, h.shape[-1])).view_as(h)
        return self.lm_head(h)


def build():
    torch.manual_seed(42)
    model = Policy()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    ids = torch.randint(0, 17, (2, 6))
    return SimpleNamespace(model=model, optimizer=optimizer, batch={"input_ids": ids})


def run(s=None):
    s = s or build()
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    losses = []
    try:
        for _ in range(2):
            ids = s.batch["input_ids"]
            logits = s.model(ids)
            loss = F.cross_entropy(logits[:, :-1].reshape(-1, 17), ids[:, 1:].reshape(-1))
            s.optimizer.zero_grad()
            loss.backward()
            s.optimizer.step()
            losses.append(loss.item())
    finally:
        torch.use_deterministic_algorithms(before)
    return losses


if __name__ == "__main__":
    print(run())
