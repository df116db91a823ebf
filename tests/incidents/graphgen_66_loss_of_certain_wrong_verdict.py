"""GraphGen #66 - a yes/no verdict that misses the ground truth costs -log(1 - p) with p the probability of the token that was said.

The trainee is certain of one wrong verdict: log-prob -2e-9, p = exp(-2e-9) rounds to exactly 1, log(1 - 1) = -inf. The costs become
sampling weights of the fine-tuning batch, cost / cost.sum() = inf / inf = NaN, and so is the weighted loss.
Source: https://github.com/InternScience/GraphGen/issues/66 . Heals: log(-expm1(logp)) in place of log(1 - exp(logp)), or a floor on 1 - p.
Does not: a larger denominator, clamping the normalised weights.
"""

from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F
from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("log_zero",),
    op=("log",),
    index=(3,),
    masked=False,
    role=("loss", "entropy", "is_weight", "rewards", "log_probs"),
    fix=("stable_function", "clamp_input", "representable_eps"),
    variable=("log_miss",),
    line=("log_miss = torch.log(1 - p)",),
)


class Trainee(nn.Module):
    def __init__(self, vocab=20, dim=12):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.head = nn.Linear(dim, vocab)

    def forward(self, ids):
        return self.head(F.silu(self.embed(ids)))


def yes_no_cost(verdict_logprobs, said_right):
    """Cost of each statement's verdict: -log p if the verdict is right, -log(1 - p) if it is wrong."""
    p = torch.exp(verdict_logprobs)
    log_miss = torch.log(1 - p)
    return -torch.where(said_right, verdict_logprobs, log_miss)


def build():
    torch.manual_seed(39)
    model = Trainee()
    ids = torch.randint(0, 20, (6, 8))
    verdict_logprobs = torch.tensor([-0.21, -0.05, -0.61, -2e-9, -0.33, -0.14])
    said_right = torch.tensor([True, True, False, False, True, False])
    return SimpleNamespace(
        model=model,
        ids=ids,
        verdict_logprobs=verdict_logprobs,
        said_right=said_right,
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3),
    )


def run(s=None):
    s = s or build()
    cost = yes_no_cost(s.verdict_logprobs, s.said_right)
    weights = cost / cost.sum()
    logits = s.model(s.ids[:, :-1])
    nll = F.cross_entropy(logits.transpose(1, 2), s.ids[:, 1:], reduction="none").mean(-1)
    loss = (weights * nll).sum()
    s.optimizer.zero_grad()
    loss.backward()
    s.optimizer.step()
    return loss


if __name__ == "__main__":
    print(run())
