"""DeepSpeed-Chat step 3 in fp16: the actor loss is inf from one step on and the loss scale falls to its minimum.

The log-probs leave the model in half precision and so does the ratio: a token of a bad answer that the policy has learned to like gives
exp(11.6) > 65504 = inf. With a negative advantage the clipped surrogate takes the unclipped branch, so loss and gradients are infinite.

Source: https://github.com/deepspeedai/DeepSpeedExamples/issues/444 , #419 and https://github.com/deepspeedai/DeepSpeedExamples/pull/754
(--compute_fp32_loss), applications/DeepSpeed-Chat .../ppo_trainer.py actor_loss_fn
Heals: the loss in float32, or a clamp of the log ratio. Does not: a clamp of the ratio after exp (0 * inf in backward).
"""

from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("fp16_overflow", "exp_overflow"),
    op=("exp",),
    index=(2, 4),
    masked=False,
    role=("ratio", "is_weight"),
    fix=("upcast_fp32", "clamp_exponent", "clamp_input"),
    variable=("ratio",),
    line=("ratio = torch.exp(log_ratio)",),
)


class Actor(nn.Module):
    def __init__(self, vocab=24, hidden=16):
        super().__init__()
        self.embed = nn.Embedding(vocab, hidden)
        self.proj = nn.Linear(hidden, hidden)
        self.lm_head = nn.Linear(hidden, vocab)

    def forward(self, ids):
        return self.lm_head(torch.tanh(self.proj(self.embed(ids))))


def gather_log_probs(logits, labels):
    log_probs = F.log_softmax(logits, dim=-1)
    return log_probs.gather(dim=-1, index=labels.unsqueeze(-1)).squeeze(-1)


def actor_loss_fn(logprobs, old_logprobs, advantages, mask, cliprange=0.2):
    log_ratio = (logprobs - old_logprobs) * mask
    ratio = torch.exp(log_ratio)
    pg_loss1 = -advantages * ratio
    pg_loss2 = -advantages * torch.clamp(ratio, 1.0 - cliprange, 1.0 + cliprange)
    pg_loss = torch.sum(torch.max(pg_loss1, pg_loss2) * mask) / mask.sum()
    return pg_loss


def build():
    torch.manual_seed(4)
    actor = Actor()
    with torch.no_grad():
        actor.lm_head.bias[7] = 5.0  # a token that the policy repeats by now
    actor = actor.half()
    optimizer = torch.optim.SGD(actor.parameters(), lr=1e-3)
    seq = torch.randint(8, 24, (4, 9))
    seq[2, 5] = 7
    mask = torch.ones(4, 8, dtype=torch.float16)
    mask[0, 6:] = 0.0
    with torch.no_grad():
        old = gather_log_probs(actor(seq[:, :-1]), seq[:, 1:])
        old = old + 0.05 * torch.randn(4, 8).half()
    old[2, 4] = -11.75  # at the rollout it was a rare token
    advantages = torch.tensor([[0.7], [1.2], [-1.4], [-0.5]], dtype=torch.float16).expand(4, 8)
    return SimpleNamespace(model=actor, optimizer=optimizer, seq=seq, old_logprobs=old, advantages=advantages, mask=mask)


def run(s=None):
    s = s or build()
    logprobs = gather_log_probs(s.model(s.seq[:, :-1]), s.seq[:, 1:])
    loss = actor_loss_fn(logprobs, s.old_logprobs, s.advantages, s.mask)
    s.optimizer.zero_grad()
    loss.backward()
    s.optimizer.step()
    return loss


if __name__ == "__main__":
    print(run())
