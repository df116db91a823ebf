"""Packed samples are averaged by segment; one generation has no action token, its mean KL is 0/0 and spoils its group's baseline.
https://github.com/OpenRLHF/OpenRLHF/pull/1239

A second fault in the same step: every sample of another group scores the same, its advantages are 0 and their std has no epsilon.
Heals: count at least one token in the segment mean and keep an epsilon in the std. Does not: only the epsilon (or nan_to_num on the std).
"""

from types import SimpleNamespace

import torch
import torch.nn as nn

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("empty_mask_mean", "zero_div_zero"),
    op=("div",),
    index=(5,),
    masked=None,
    role=("kl", "rewards"),
    fix=("guard_empty", "clamp_denominator", "drop_invalid_sample"),
    variable=("kl_mean",),
    line=("kl_mean = segment_sum(log_probs - ref_log_probs, segments, len(lengths)) / lengths",),
)


class PackedLM(nn.Module):
    """Causal mixing inside each packed segment."""

    def __init__(self, vocab=21, width=10):
        super().__init__()
        self.emb = nn.Embedding(vocab, width)
        self.mix = nn.Linear(2 * width, width)
        self.head = nn.Linear(width, vocab)

    def forward(self, ids, starts):
        h = self.emb(ids)
        previous = torch.cat([torch.zeros_like(h[:1]), h[:-1]]).masked_fill(starts[:, None], 0.0)
        return self.head(torch.tanh(self.mix(torch.cat([h, previous], -1))))


def segment_sum(values, segments, count):
    return torch.zeros(count, dtype=values.dtype).index_add(0, segments, values)


@torch.no_grad()
def compute_advantages(scores, log_probs, ref_log_probs, segments, lengths, n_samples, kl_coef):
    kl_mean = segment_sum(log_probs - ref_log_probs, segments, len(lengths)) / lengths
    rewards = (scores - kl_coef * kl_mean).view(-1, n_samples)
    advantages = rewards - rewards.mean(-1, keepdim=True)
    advantages = advantages / rewards.std(-1, keepdim=True)
    return advantages.flatten()[segments]


def build():
    torch.manual_seed(1239)
    policy = PackedLM()
    lengths = torch.tensor([4, 2, 3, 5, 3, 0, 4, 2, 3])
    segments = torch.arange(9).repeat_interleave(lengths)
    starts = torch.ones(int(lengths.sum()), dtype=torch.bool)
    starts[1:] = segments[1:] != segments[:-1]
    ids = torch.randint(0, 21, (int(lengths.sum()),))
    labels = torch.randint(0, 21, (int(lengths.sum()),))
    with torch.no_grad():
        old = policy(ids, starts).log_softmax(-1).gather(-1, labels[:, None]).squeeze(-1)
    ref = old + 0.1 * torch.randn_like(old)
    ref[segments >= 6] = old[segments >= 6]  # the policy has not moved on these yet
    scores = torch.tensor([1.0, 0.0, 1.0, 0.5, 1.0, 0.0, 0.5, 0.5, 0.5])
    batch = dict(ids=ids, labels=labels, starts=starts, segments=segments, lengths=lengths, scores=scores, old=old, ref=ref)
    return SimpleNamespace(model=policy, optimizer=torch.optim.AdamW(policy.parameters(), lr=1e-5), batch=batch)


def run(s=None):
    s = s or build()
    b = s.batch
    advantages = compute_advantages(b["scores"], b["old"], b["ref"], b["segments"], b["lengths"], n_samples=3, kl_coef=0.05)
    log_probs = s.model(b["ids"], b["starts"]).log_softmax(-1).gather(-1, b["labels"][:, None]).squeeze(-1)
    ratio = torch.exp(log_probs - b["old"])
    loss = -torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages).mean()
    s.optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(s.model.parameters(), 1.0)
    s.optimizer.step()
    return loss
