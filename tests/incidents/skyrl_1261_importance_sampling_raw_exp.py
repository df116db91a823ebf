"""SkyRL #1261 (https://github.com/NovaSky-AI/SkyRL/pull/1261): importance_sampling_loss was the only policy loss with a raw torch.exp of the
log ratio. A trajectory that was sampled by an old weight version contains a token which the sampler found next to impossible and the
trainer now finds likely; the ratio of that (counted) token overflows.

Heals: clamp the log ratio before exp (the pull request's safe_exp_delta). Does not heal: clamp the ratio after exp, the loss is finite then
and the backward makes 0 * inf.
"""

from types import SimpleNamespace

import torch
import torch.nn as nn

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("exp_overflow",),
    op=("exp",),
    index=(2, 3),
    masked=False,
    role=("ratio", "is_weight"),
    fix=("clamp_exponent", "drop_invalid_sample", "clamp_input"),
    variable=("ratio",),
    line=("ratio = torch.exp(log_probs - old_log_probs)",),
)


class Policy(nn.Module):
    def __init__(self, vocab=32, dim=16):
        super().__init__()
        self.embed_tokens = nn.Embedding(vocab, dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 2 * dim), nn.SiLU(), nn.Linear(2 * dim, dim))
        self.lm_head = nn.Linear(dim, vocab, bias=False)

    def forward(self, sequences):
        hidden = self.embed_tokens(sequences)
        return self.lm_head(hidden + self.mlp(hidden))


def action_log_probs(model, sequences, num_actions):
    logits = model(sequences)[:, :-1]
    log_probs = logits.log_softmax(-1).gather(-1, sequences[:, 1:].unsqueeze(-1)).squeeze(-1)
    return log_probs[:, -num_actions:]


def reduce_loss(loss, loss_mask, loss_reduction):
    if loss_reduction == "token_mean":
        return (loss * loss_mask).sum() / loss_mask.sum().clamp(min=1)
    per_sequence = (loss * loss_mask).sum(-1) / loss_mask.sum(-1).clamp(min=1)
    return per_sequence.mean()


def importance_sampling_loss(log_probs, old_log_probs, advantages, loss_mask, loss_reduction="token_mean"):
    ratio = torch.exp(log_probs - old_log_probs)
    loss = reduce_loss(-ratio * advantages, loss_mask, loss_reduction)
    with torch.no_grad():
        metrics = {"iw_mean": (ratio * loss_mask).sum() / loss_mask.sum(), "iw_max": ratio.max()}
    return loss, metrics


def build():
    torch.manual_seed(1261)
    policy = Policy()
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-4)
    sequences = torch.randint(0, 32, (4, 10))
    with torch.no_grad():
        behaviour = action_log_probs(policy, sequences, 5) + 0.05 * torch.randn(4, 5)
    behaviour[2, 3] = -104.5  # eight weight versions old
    loss_mask = torch.ones(4, 5)
    loss_mask[0, 3:] = 0
    loss_mask[3, 4] = 0
    rewards = torch.tensor([1.0, 0.0, 1.0, 0.0])
    advantages = ((rewards - rewards.mean()) / (rewards.std() + 1e-6)).unsqueeze(-1).expand(4, 5)
    batch = SimpleNamespace(sequences=sequences, old_log_probs=behaviour, advantages=advantages, loss_mask=loss_mask)
    return SimpleNamespace(model=policy, optimizer=optimizer, batch=batch)


def run(s=None):
    s = s or build()
    log_probs = action_log_probs(s.model, s.batch.sequences, 5)
    loss, s.metrics = importance_sampling_loss(log_probs, s.batch.old_log_probs, s.batch.advantages, s.batch.loss_mask)
    s.optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(s.model.parameters(), 1.0)
    s.optimizer.step()
    return loss


if __name__ == "__main__":
    print(run().item())
