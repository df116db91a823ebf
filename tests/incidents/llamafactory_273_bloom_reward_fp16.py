"""Pairwise reward-model training of a BLOOM-like backbone under fp16 autocast.

A token with outlier activations makes the second MLP projection of a block exceed 65504: it is inf in fp16, the residual carries
it on, the next LayerNorm computes inf - inf = NaN, the reward of that answer and the ranking loss are NaN.
Source: https://github.com/hiyouga/LlamaFactory/issues/273
Heals: this projection in fp32 (or bf16).
Does not: LayerNorm in fp32 (autocast does it already); a smaller lr; a fp32 value head.
"""

from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import nn

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("fp16_overflow",),
    op=("linear", "addmm", "mm"),
    index=(8, 3),
    masked=False,
    role=("hidden",),
    fix=("upcast_fp32", "clamp_input"),
    variable=("output",),
    line=("output = self.dense_4h_to_h(intermediate)",),
)


class BloomMLP(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.dense_h_to_4h = nn.Linear(dim, 4 * dim)
        self.dense_4h_to_h = nn.Linear(4 * dim, dim)

    def forward(self, hidden_states, residual):
        intermediate = F.gelu(self.dense_h_to_4h(hidden_states))
        output = self.dense_4h_to_h(intermediate)
        return residual + output


class BloomRewardModel(nn.Module):
    def __init__(self, vocab=30, dim=16, layers=2):
        super().__init__()
        self.word_embeddings = nn.Embedding(vocab, dim)
        self.norms = nn.ModuleList(nn.LayerNorm(dim) for _ in range(layers))
        self.mlps = nn.ModuleList(BloomMLP(dim) for _ in range(layers))
        self.ln_f = nn.LayerNorm(dim)
        self.v_head = nn.Linear(dim, 1)

    def forward(self, packed_ids, last_index):
        hidden_states = self.word_embeddings(packed_ids)
        for norm, mlp in zip(self.norms, self.mlps, strict=True):
            hidden_states = mlp(norm(hidden_states), hidden_states)
        return self.v_head(self.ln_f(hidden_states)[last_index].float()).squeeze(-1)


def build():
    torch.manual_seed(37)
    model = BloomRewardModel()
    with torch.no_grad():  # the outlier direction of the pretrained checkpoint
        direction = model.norms[0](model.word_embeddings.weight[7])
        model.mlps[0].dense_h_to_4h.weight[5] = 14.0 * direction
        model.mlps[0].dense_4h_to_h.weight[3, 5] = 420.0
    packed_ids = torch.randint(8, 30, (18,))
    lengths = torch.tensor([4, 5, 6, 3])  # chosen, chosen, rejected, rejected
    last_index = lengths.cumsum(0) - 1
    packed_ids[last_index[1]] = 7
    batch = dict(packed_ids=packed_ids, last_index=last_index)
    return SimpleNamespace(model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-5), batch=batch)


def run(s=None):
    s = s or build()
    for _ in range(2):
        with torch.autocast("cpu", dtype=torch.float16):
            values = s.model(s.batch["packed_ids"], s.batch["last_index"])
        chosen_rewards, rejected_rewards = values.view(2, 2)
        loss = -F.logsigmoid(chosen_rewards.float() - rejected_rewards.float()).mean()
        s.optimizer.zero_grad()
        loss.backward()
        s.optimizer.step()
    return loss.item(), s.model.v_head.weight.isfinite().all().item()


if __name__ == "__main__":
    print(run())
