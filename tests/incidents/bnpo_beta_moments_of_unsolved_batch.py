"""BNPO (beta normalisation policy optimisation): in the first batch of a hard task no prompt has a right answer.

The advantage r - p is divided by the density of a Beta distribution whose parameters are the moment estimates from the success rates p of the prompts
of the batch: a = (m (1 - m) / v - 1) m. With every p = 0 mean and variance are 0, the fraction is 0/0; clamp(1 + a / 3, min=1) hands the NaN on,
and NaN * (r - p) makes an advantage of NaN where it should be 0.

Source: https://github.com/changyi7231/BNPO/blob/main/recipe/bnpo/src/bnpo_ray_trainer.py (compute_bnpo_outcome_advantage; it has the case of
a batch with one prompt, not the one of equal prompts)
Heals: a floor under the variance; alpha = beta = 1 where the prompts do not differ.
Does not: the clamp of alpha and beta, the clamp of the weight to [0, 1e6] (both keep NaN), masking by the response mask, clipping the ratio.
"""

from types import SimpleNamespace

import torch
from torch import nn

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("zero_div_zero",),
    op=("div",),
    index=(),
    masked=False,
    role=("advantages", "rewards", "hidden"),
    fix=("clamp_denominator", "guard_small_group", "avoid_singular_op"),
    variable=(None,),
    line=("a = (p_mean * (1 - p_mean) / p_var - 1) * p_mean",),
)


def beta_log_prob(p, alpha, beta):
    norm = torch.lgamma(alpha + beta) - torch.lgamma(alpha) - torch.lgamma(beta)
    return torch.xlogy(alpha - 1, p) + torch.xlogy(beta - 1, 1 - p) + norm


@torch.no_grad()
def bnpo_outcome_advantage(token_level_rewards, response_mask, uid):
    scores = token_level_rewards.sum(dim=-1)
    prompts, position = torch.unique(uid, return_inverse=True)
    total = torch.zeros(len(prompts)).index_add_(0, position, scores)
    all_p = total / torch.bincount(position)
    p_mean = all_p.mean()
    p_var = all_p.var() if len(prompts) > 1 else torch.tensor(1.0)
    a = (p_mean * (1 - p_mean) / p_var - 1) * p_mean
    b = (p_mean * (1 - p_mean) / p_var - 1) * (1 - p_mean)
    alpha = torch.clamp(1 + a / 3, min=1.0)
    beta = torch.clamp(1 + b / 3, min=1.0)
    p = all_p[position]
    weight = torch.clamp(1 / beta_log_prob(p, alpha, beta).exp(), min=0, max=1e6)
    return (weight * (scores - p))[:, None] * response_mask


class Policy(nn.Module):
    def __init__(self, vocab: int, dim: int):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.rnn = nn.GRU(dim, dim, batch_first=True)
        self.head = nn.Linear(dim, vocab)

    def forward(self, tokens):
        return self.head(self.rnn(self.embed(tokens))[0])


def build():
    torch.manual_seed(13)
    model = Policy(20, 16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    tokens = torch.randint(0, 20, (8, 7))
    response_mask = torch.ones(8, 6)
    response_mask[2, 4:] = 0
    response_mask[5, 3:] = 0
    with torch.no_grad():
        logp = torch.log_softmax(model(tokens[:, :-1]), dim=-1).gather(2, tokens[:, 1:, None]).squeeze(-1)
    batch = {
        "tokens": tokens,
        "response_mask": response_mask,
        "old_log_probs": logp + 0.02 * torch.randn(8, 6),
        "ref_log_probs": logp + 0.05 * torch.randn(8, 6),
        "rewards": torch.zeros(8, 6),
        "uid": torch.tensor([0, 0, 1, 1, 2, 2, 3, 3]),
    }
    return SimpleNamespace(model=model, optimizer=optimizer, batch=batch)


def run(s=None):
    s = s or build()
    b, losses = s.batch, []
    for _ in range(2):
        advantages = bnpo_outcome_advantage(b["rewards"], b["response_mask"], b["uid"])
        log_probs = torch.log_softmax(s.model(b["tokens"][:, :-1]), dim=-1).gather(2, b["tokens"][:, 1:, None]).squeeze(-1)
        ratio = torch.exp(log_probs - b["old_log_probs"])
        surrogate = -torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
        log_ratio = (b["ref_log_probs"] - log_probs).clamp(-20, 20)
        kl = torch.exp(log_ratio) - log_ratio - 1
        loss = ((surrogate + 0.01 * kl) * b["response_mask"]).sum() / b["response_mask"].sum()
        s.optimizer.zero_grad()
        loss.backward()
        s.optimizer.step()
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    print(run())
