"""TVDiag, SupConLoss - a batch of incidents that all have the same root cause.

With one label in the batch there is no negative: no_sim_sum is 0. On the diagonal sim is 0 as well (mask_dj), so sim / sim_sum is 0 / 0 before the identity
is added that was to make the log 0 there. (Source: WHU-AISE/TVDiag, core/loss/SupervisedContrastiveLoss.py, pull request 5.) Heals: 1e-8 on the denominator
(the pull request); clamping it; a where on denominators that are 0; skipping batches of one class. Does not: another temperature, an epsilon in the log,
normalised embeddings (they are), nan_to_num of loss_partial (gradient NaN).
"""

from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import nn

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("zero_div_zero",),
    op=("div",),
    index=(0, 0),
    masked=None,
    role=("loss", "hidden"),
    fix=(
        "representable_eps",
        "clamp_denominator",
        "where_on_detached",
        "guard_small_group",
        "guard_empty",
        "mask_before_op",
        "drop_invalid_sample",
        "stable_function",
        "skip_bad_step",
        "fix_upstream",
    ),
    variable=(None,),
    line=("loss_partial = -torch.log(mask_no_sim + torch.div(sim, sim_sum) + torch.eye(n, n))",),
)


class SupConLoss(nn.Module):
    def __init__(self, temperature=0.5):
        super().__init__()
        self.register_buffer("temperature", torch.tensor(temperature))

    def forward(self, embeddings, labels):
        n = labels.shape[0]
        embeddings = F.normalize(embeddings, dim=1)
        similarity_matrix = F.cosine_similarity(embeddings.unsqueeze(1), embeddings.unsqueeze(0), dim=2)

        mask = torch.ones_like(similarity_matrix) * (labels.expand(n, n).eq(labels.expand(n, n).t()))
        mask_no_sim = torch.ones_like(mask) - mask

        mask_dj = torch.ones(n, n) - torch.eye(n, n)
        similarity_matrix = torch.exp(similarity_matrix / self.temperature)
        similarity_matrix = similarity_matrix * mask_dj

        sim = mask * similarity_matrix
        no_sim = similarity_matrix - sim

        no_sim_sum = torch.sum(no_sim, dim=1)
        no_sim_sum_expend = no_sim_sum.repeat(n, 1).T
        sim_sum = sim + no_sim_sum_expend

        loss_partial = -torch.log(mask_no_sim + torch.div(sim, sim_sum) + torch.eye(n, n))

        nonzero_count = len(torch.nonzero(loss_partial))
        if nonzero_count == 0:
            nonzero_count = 1

        loss = torch.sum(torch.sum(loss_partial, dim=1)) / nonzero_count
        return loss


class Diagnoser(nn.Module):
    def __init__(self):
        super().__init__()
        self.metric_encoder = nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 8))
        self.type_head = nn.Linear(8, 4)

    def forward(self, metrics):
        emb = self.metric_encoder(metrics)
        return emb, self.type_head(emb)


def build():
    torch.manual_seed(17)
    model = Diagnoser()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, weight_decay=1e-4)
    batches = [
        dict(metrics=torch.randn(6, 12), types=torch.tensor([0, 2, 2, 1, 0, 3])),
        dict(metrics=torch.randn(3, 12), types=torch.tensor([2, 2, 2])),
    ]
    return SimpleNamespace(model=model, optimizer=optimizer, supcon=SupConLoss(), batches=batches)


def run(s=None):
    s = s or build()
    for batch in s.batches:
        emb, logits = s.model(batch["metrics"])
        loss = F.cross_entropy(logits, batch["types"]) + 0.1 * s.supcon(emb, batch["types"])
        s.optimizer.zero_grad()
        loss.backward()
        s.optimizer.step()
    return loss


if __name__ == "__main__":
    print(run())
