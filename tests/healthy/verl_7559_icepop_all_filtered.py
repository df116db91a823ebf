"""IcePop rejects every importance weight of a batch, one of which overflowed to inf; its effective sample size is 0/0, a metric only.
https://github.com/verl-project/verl/pull/7559

The weights are detached and selected with where, the critic of the same step is trained, its explained variance is NaN (one valid return)
and is logged as well. Loss, gradients and weights stay finite.
"""

from types import SimpleNamespace

import torch
import torch.nn as nn


class ActorCritic(nn.Module):
    def __init__(self, vocab=19, width=12):
        super().__init__()
        self.emb = nn.Embedding(vocab, width)
        self.body = nn.Sequential(nn.Linear(width, width), nn.Tanh())
        self.lm_head = nn.Linear(width, vocab)
        self.v_head = nn.Linear(width, 1)

    def forward(self, ids):
        h = self.body(self.emb(ids[:, :-1]))
        logp = self.lm_head(h).log_softmax(-1)
        return logp.gather(-1, ids[:, 1:, None]).squeeze(-1), -(logp.exp() * logp).sum(-1), self.v_head(h).squeeze(-1)


@torch.no_grad()
def icepop_weights(old_log_prob, rollout_log_prob, mask, lower=0.5, upper=5.0):
    log_ratio = old_log_prob - rollout_log_prob
    ratio = torch.exp(log_ratio)
    keep = (ratio >= lower) & (ratio <= upper) & mask.bool()
    weights = torch.where(keep, ratio, 0.0)
    mean = (weights * mask).sum() / mask.sum()
    normalised = weights / mean
    ess = 1.0 / ((normalised.square() * mask).sum() / mask.sum())
    return weights, {"rollout_is_mean": mean.item(), "rollout_is_eff_sample_size": ess.item()}


def build():
    torch.manual_seed(7559)
    model = ActorCritic()
    ids = torch.randint(0, 19, (3, 8))
    mask = torch.zeros(3, 7)
    mask[0, 2:6] = 1
    mask[1, 2:4] = 1
    with torch.no_grad():
        old_log_prob, _, values = model(ids)
    rollout = old_log_prob + 3.0  # the engine runs other weights: every ratio is below the band
    rollout[0, 3] = old_log_prob[0, 3] - 95.0
    rollout[2] = 0.0  # prompt-only sample
    batch = dict(ids=ids, mask=mask, old=old_log_prob, rollout=rollout, adv=torch.randn(3, 7), returns=values + 0.3 * torch.randn(3, 7))
    batch["final"] = torch.tensor([[0] * 5 + [1, 0], [0] * 7, [0] * 7], dtype=torch.bool)
    return SimpleNamespace(model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-4), batch=batch, metrics={})


def run(s=None):
    s = s or build()
    b, mask = s.batch, s.batch["mask"]
    weights, s.metrics = icepop_weights(b["old"], b["rollout"], mask)
    logp, entropy, values = s.model(b["ids"])
    ratio = torch.exp(logp - b["old"])
    pg = torch.max(-b["adv"] * ratio, -b["adv"] * ratio.clamp(0.8, 1.2)) * weights
    policy_loss = (pg * mask).sum() / mask.sum()
    value_loss = 0.5 * ((values - b["returns"]).square() * mask).sum() / mask.sum()
    loss = policy_loss + value_loss - 0.001 * (entropy * mask).sum() / mask.sum()
    with torch.no_grad():
        final, predicted = b["returns"][b["final"]], values[b["final"]]
        s.metrics["critic/vf_explained_var"] = (1.0 - torch.var(final - predicted) / torch.var(final)).item()
    s.optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(s.model.parameters(), 1.0)
    s.optimizer.step()
    return loss
