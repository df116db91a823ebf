"""PPO policy loss of a trainer with partial rollouts, whose off-policy prefix is masked out of the loss.

The continued rollout begins with tokens of weights many updates old; loss_mask is 0 there, rightly. One of their old log-probs is
-101, the ratio overflows, the negative advantage makes the surrogate +inf, and inf * loss_mask = inf * 0 = NaN.
Source: https://github.com/THUDM/slime/pull/2198
Heals: clamping the log ratio before exp, or zeroing it where the mask is 0.
Does not: the clip range (max takes the unclipped branch); torch.where on the finished loss; a smaller lr.
"""

from types import SimpleNamespace

import torch
from torch import nn

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("inf_times_zero_mask",),
    op=("exp",),
    index=(12,),
    masked=True,
    role=("ratio", "is_weight"),
    fix=("mask_before_op", "clamp_exponent", "fix_upstream", "clamp_input"),
    variable=("ratio",),
    line=("ratio = (-ppo_kl).exp()",),
)


class Actor(nn.Module):
    def __init__(self, vocab=32, dim=16):
        super().__init__()
        self.embedding = nn.Embedding(vocab, dim)
        self.decoder = nn.Sequential(nn.Linear(dim, 32), nn.GELU(), nn.Linear(32, dim))
        self.output_layer = nn.Linear(dim, vocab, bias=False)

    def forward(self, tokens):
        h = self.embedding(tokens)
        return self.output_layer(h + self.decoder(h))


def log_probs_of_packed(model, samples):
    out = []
    for tokens in samples:
        logp = model(tokens[:-1]).log_softmax(-1)
        out.append(logp.gather(-1, tokens[1:, None]).squeeze(-1))
    return out


def compute_policy_loss(ppo_kl, advantages, eps_clip, eps_clip_high):
    ratio = (-ppo_kl).exp()
    pg_losses1 = -ratio * advantages
    pg_losses2 = -ratio.clamp(1 - eps_clip, 1 + eps_clip_high) * advantages
    clip_pg_losses1 = torch.maximum(pg_losses1, pg_losses2)
    clipfrac = torch.gt(pg_losses2, pg_losses1).float()
    return clip_pg_losses1, clipfrac


def sum_of_sample_mean(x, lengths, loss_masks):
    parts = x.split(lengths)
    return sum((p * m).sum() / m.sum().clamp(min=1) for p, m in zip(parts, loss_masks, strict=True))


def build():
    torch.manual_seed(17)
    model = Actor()
    samples = [torch.randint(0, 32, (n,)) for n in (10, 13, 8)]
    with torch.no_grad():
        old = [lp + 0.03 * torch.randn_like(lp) for lp in log_probs_of_packed(model, samples)]
    loss_masks = [torch.ones(len(lp)) for lp in old]
    loss_masks[1][:5] = 0  # prefix generated before the abort
    old[1][:5] += torch.tensor([-2.0, 1.0, -4.0, -97.5, 0.5])
    rollout = dict(
        samples=samples, log_probs=old, loss_masks=loss_masks, advantages=[torch.full_like(lp, a) for lp, a in zip(old, (0.9, -1.1, 0.2))]
    )
    return SimpleNamespace(model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3), batch=rollout)


def run(s=None, eps_clip=0.2, eps_clip_high=0.28):
    s = s or build()
    b = s.batch
    lengths = [len(m) for m in b["loss_masks"]]
    for _ in range(2):
        log_probs = torch.cat(log_probs_of_packed(s.model, b["samples"]))
        old_log_probs, advantages = torch.cat(b["log_probs"]), torch.cat(b["advantages"])
        ppo_kl = old_log_probs - log_probs
        pg_loss, _ = compute_policy_loss(ppo_kl, advantages, eps_clip, eps_clip_high)
        loss = sum_of_sample_mean(pg_loss, lengths, b["loss_masks"]) / len(lengths)
        s.optimizer.zero_grad()
        loss.backward()
        s.optimizer.step()
    return loss.item(), s.model.embedding.weight.isfinite().all().item()


if __name__ == "__main__":
    print(run())
