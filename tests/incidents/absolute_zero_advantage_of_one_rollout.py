"""garetht/absolute_zero_reproduction, compute_advantages - minibatch_size 1 leaves one reward per role and task.

The rewards are normalised over their last dimension, role by role and task by task. With one rollout torch.std (unbiased) of one number is NaN and the epsilon behind it does not help.
(Source: garetht/absolute_zero_reproduction, model/compute/advantages.py, compute_advantages.) Heals: std(unbiased=False), advantages become 0; dividing only if there is more than one
rollout; refusing minibatch_size < 2 (2 rollouts are fine). Does not: a larger args.eps; torch.clamp of the std (NaN stays NaN).
"""

from types import SimpleNamespace

import torch
import torch.nn as nn

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("std_single",),
    op=("std",),
    index=(0, 0, 0),
    masked=None,
    role=("advantages", "rewards"),
    fix=("guard_small_group", "validate_config", "avoid_singular_op", "fix_upstream"),
    variable=(None,),
    line=("rewards /= rewards.std(dim=-1, keepdim=True) + args.eps",),
)


class Model(nn.Module):
    def __init__(self, vocab=18, dim=16):
        super().__init__()
        self.tok = nn.Embedding(vocab, dim)
        self.rnn = nn.GRU(dim, dim, batch_first=True)
        self.head = nn.Linear(dim, vocab)

    def forward(self, ids):
        return self.head(self.rnn(self.tok(ids))[0])


def compute_advantages(args, rewards):
    rewards -= rewards.mean(dim=-1, keepdim=True)
    rewards /= rewards.std(dim=-1, keepdim=True) + args.eps
    return rewards


def logprobs(model, ids):
    logits = model(ids[..., :-1].reshape(-1, ids.size(-1) - 1)).log_softmax(-1)
    return logits.gather(-1, ids[..., 1:].reshape(-1, ids.size(-1) - 1, 1)).squeeze(-1).view(*ids.shape[:-1], -1)


def build(minibatch_size=1):
    torch.manual_seed(0)
    args = SimpleNamespace(eps=1e-5, clip_ratio=0.2, minibatch_size=minibatch_size)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6)
    ids = torch.randint(1, 18, (2, 3, minibatch_size, 9))
    attention_masks = torch.ones(2, 3, minibatch_size, 8)
    attention_masks[1, 2, :, 6:] = 0
    rewards = torch.tensor([[0.5, -0.5, 1.0], [1.0, -1.0, 0.5]]).unsqueeze(-1).repeat(1, 1, minibatch_size)
    rewards = rewards + 0.5 * torch.arange(minibatch_size)
    with torch.no_grad():
        old = logprobs(model, ids) + 0.03 * torch.randn(2, 3, minibatch_size, 8)
    return SimpleNamespace(
        args=args, model=model, optimizer=optimizer, ids=ids, attention_masks=attention_masks, rewards=rewards, old_logprobs=old
    )


def compute_trr_objective(args, new_logprobs, old_logprobs, advantages, masks):
    ratio = (new_logprobs - old_logprobs).exp()
    adv = advantages.unsqueeze(-1)
    clipped = torch.clamp(ratio, 1 - args.clip_ratio, 1 + args.clip_ratio) * adv
    objective = torch.minimum(ratio * adv, clipped)
    return (objective * masks).sum() / masks.sum()


def run(s=None):
    s = s or build()
    advantages = compute_advantages(s.args, s.rewards.clone())
    loss = -compute_trr_objective(s.args, logprobs(s.model, s.ids), s.old_logprobs, advantages, s.attention_masks)
    s.optimizer.zero_grad()
    loss.backward()
    s.optimizer.step()
    return loss


if __name__ == "__main__":
    print(run())
