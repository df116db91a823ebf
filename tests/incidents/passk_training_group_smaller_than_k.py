"""Pass@k training - the analytic advantage divides by C(n, k), and aborted rollouts left a group with fewer than k samples.

With n < k there is no way to draw k samples: both binomials are 0 and the rate of failing draws is 0 / 0, so the advantages of
that prompt are NaN. (lgamma of a non-positive integer is +inf here on purpose: exp(-inf) makes the binomial an exact 0, as it
should be.) Source: https://github.com/RUCAIBox/Passk_Training/blob/main/code/passk_adv.py (`calc_adv`). Drawing min(k, n) samples or
dropping the prompt heals; the 1e-6 next to sigma does not.
"""

from types import SimpleNamespace

import torch
import torch.nn as nn

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("zero_div_zero", "zero_denominator"),
    op=("div",),
    index=(2,),
    masked=False,
    role=("advantages", "rewards"),
    fix=("guard_small_group", "clamp_denominator", "drop_invalid_sample", "mask_before_op"),
    variable=("fail",),
    line=("fail = comb(n - c, k) / comb(n, k)",),
)


def comb(n, k):
    n = n.clamp(min=0).double()
    k = torch.as_tensor(k, dtype=torch.float64)
    return (torch.lgamma(n + 1) - torch.lgamma(k + 1) - torch.lgamma(n - k + 1)).exp()


def passk_advantages(correct, index, num_groups, k=4):
    n = torch.zeros(num_groups).index_add_(0, index, torch.ones_like(correct))
    c = torch.zeros(num_groups).index_add_(0, index, correct)
    fail = comb(n - c, k) / comb(n, k)
    sigma = (fail * (1 - fail)).sqrt()
    adv_pos = fail / (sigma + 1e-6)
    adv_neg = (fail - comb(n - c - 1, k - 1) / comb(n - 1, k - 1)) / (sigma + 1e-6)
    return torch.where(correct > 0, adv_pos[index], adv_neg[index]).float()


class TinyLM(nn.Module):
    def __init__(self, vocab=18, dim=10):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.lm_head = nn.Linear(dim, vocab)

    def forward(self, ids):
        return self.lm_head(torch.tanh(self.embed(ids)))


def build():
    torch.manual_seed(18)
    model = TinyLM()
    index = torch.tensor([0] * 8 + [1] * 8 + [2] * 2)  # six of the eight rollouts of prompt 2 were aborted
    correct = torch.tensor([1.0, 0, 0, 0, 0, 0, 1, 0] + [0.0] * 5 + [1, 0, 0] + [0.0, 1])
    ids = torch.randint(0, 18, (18, 7))
    mask = torch.ones(18, 6)
    mask[3, 4:] = 0
    return SimpleNamespace(
        model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-4), ids=ids, response_mask=mask, index=index, correct=correct
    )


def run(s=None):
    s = s or build()
    s.advantages = passk_advantages(s.correct, s.index, num_groups=3)
    logps = s.model(s.ids[:, :-1]).log_softmax(-1).gather(-1, s.ids[:, 1:, None]).squeeze(-1)
    ratio = (logps - logps.detach()).exp()
    adv = s.advantages.unsqueeze(-1)
    pg_losses = torch.max(-adv * ratio, -adv * ratio.clamp(0.8, 1.28))
    loss = (pg_losses * s.response_mask).sum() / s.response_mask.sum()
    s.optimizer.zero_grad()
    loss.backward()
    s.optimizer.step()
    return loss


if __name__ == "__main__":
    print(run())
