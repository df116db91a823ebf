"""NeMo Automodel #3850 - InfoNCE of a retriever with a learned temperature: padded hard negatives are -inf before the division by it.

-inf / temperature is -inf and the softmax leaves these candidates out: the loss is right and finite. The division's derivative by the temperature
is -score / temperature ** 2 times the incoming gradient, for a padded candidate inf * 0 = NaN, and one NaN in that sum is the gradient of the
temperature. The embeddings get a sound gradient in the first step; the NaN temperature ruins everything in the second.
Source: https://github.com/NVIDIA-NeMo/Automodel/pull/3850
Heals: scaling first and masking afterwards, a large finite fill, choosing the real candidates before the division. Does not: clipping (the norm is
NaN), nan_to_num of the loss, a floor under the temperature.
"""

from types import SimpleNamespace

import torch
from torch import nn
import torch.nn.functional as F

from expected import Expected

EXPECTED = Expected(
    phase=("backward",),
    cause=("where_grad_trap", "inf_times_zero_mask"),
    op=("masked_fill", "div"),
    index=(1, 2),
    masked=True,
    role=("logits",),
    fix=("finite_mask_fill", "mask_before_op", "where_on_detached", "clamp_input"),
    variable=("hard_scores", "hard_logits"),
    line=('hard_scores = hard_scores.masked_fill(~batch["negative_mask"], float("-inf"))', "hard_logits = hard_scores / self.temperature"),
)


class BiEncoder(nn.Module):
    def __init__(self, vocab=50, dim=24):
        super().__init__()
        self.embed = nn.EmbeddingBag(vocab, dim, mode="mean")
        self.proj = nn.Linear(dim, dim)
        self.temperature = nn.Parameter(torch.tensor(0.05))

    def encode(self, ids):
        return F.normalize(self.proj(self.embed(ids)), dim=-1)

    def forward(self, batch):
        q = self.encode(batch["query"])
        d = self.encode(batch["positive"])
        n = self.encode(batch["negatives"].flatten(0, 1)).unflatten(0, batch["negatives"].shape[:2])
        in_batch_logits = q @ d.T / self.temperature
        hard_scores = torch.einsum("bd,bnd->bn", q, n)
        hard_scores = hard_scores.masked_fill(~batch["negative_mask"], float("-inf"))
        hard_logits = hard_scores / self.temperature
        logits = torch.cat([in_batch_logits, hard_logits], dim=1)
        return F.cross_entropy(logits, torch.arange(len(q)))


def build():
    torch.manual_seed(0)
    model = BiEncoder()
    negative_mask = torch.ones(4, 3, dtype=torch.bool)
    negative_mask[1, 2:] = False
    negative_mask[3, 1:] = False
    batch = dict(
        query=torch.randint(0, 50, (4, 6)),
        positive=torch.randint(0, 50, (4, 8)),
        negatives=torch.randint(0, 50, (4, 3, 8)),
        negative_mask=negative_mask,
    )
    return SimpleNamespace(model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3), batch=batch)


def run(s=None):
    s = s or build()
    losses = []
    for _ in range(2):
        s.optimizer.zero_grad()
        loss = s.model(s.batch)
        loss.backward()
        s.optimizer.step()
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    print(run())
