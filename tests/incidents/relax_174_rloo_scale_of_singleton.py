"""RLOO in its scaling form, A_i = k / (k - 1) * (r_i - mean): dynamic filtering left one group with a single response, k / (k - 1) is 1 / 0 = inf
and inf * (r - mean) = inf * 0 = NaN.

Source: https://github.com/redai-studio/Relax/issues/174 and https://github.com/redai-studio/Relax/issues/186 (A_i = G/(G-1) * (r_i - mean), which
has to insist on G >= 2). Heals: a guard for groups of one (or k - 1 clamped at 1). A nan_to_num on the loss leaves the gradient NaN.
"""

from types import SimpleNamespace

import torch
import torch.nn as nn

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("zero_denominator", "zero_div_zero"),
    op=("div",),
    index=(2,),
    masked=None,
    role=("advantages", "rewards"),
    fix=("guard_small_group", "clamp_denominator", "drop_invalid_sample", "reject_input"),
    variable=("scale",),
    line=("scale = group_size / (group_size - 1)",),
)


class Policy(nn.Module):
    def __init__(self, vocab=16, dim=8):
        super().__init__()
        self.embed_tokens = nn.Embedding(vocab, dim)
        self.mixer = nn.Linear(dim, dim)
        self.lm_head = nn.Linear(dim, vocab, bias=False)

    def forward(self, input_ids):
        hidden = self.embed_tokens(input_ids)
        return self.lm_head(hidden + torch.tanh(self.mixer(hidden)))


def dynamic_filter(samples):
    """Keeps the finished responses; a group may end up ragged."""
    return [sample for sample in samples if not sample["aborted"]]


def rloo_advantages(rewards, group_index):
    num_groups = int(group_index.max()) + 1
    group_size = torch.zeros(num_groups).index_add_(0, group_index, torch.ones_like(rewards))
    group_mean = torch.zeros(num_groups).index_add_(0, group_index, rewards) / group_size
    scale = group_size / (group_size - 1)
    return scale[group_index] * (rewards - group_mean[group_index])


def compute_rloo_loss(log_probs, advantages, loss_mask):
    pg_loss = -(advantages.detach()[:, None] * log_probs)
    return (pg_loss * loss_mask).sum() / loss_mask.sum()


def build():
    torch.manual_seed(174)
    model = Policy()
    samples = []
    for group, scores in enumerate([[1.0, 0.0, 0.0], [0.0, 1.0, 1.0], [1.0, 0.0, 0.0]]):
        for position, score in enumerate(scores):
            samples.append(
                {
                    "tokens": torch.randint(0, 16, (7,)),
                    "reward": score,
                    "group_index": group,
                    "length": 4 + position,
                    "aborted": group == 2 and position > 0,
                }
            )
    return SimpleNamespace(model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-4), samples=dynamic_filter(samples))


def run(s=None):
    s = s or build()
    tokens = torch.stack([sample["tokens"] for sample in s.samples])
    rewards = torch.tensor([sample["reward"] for sample in s.samples])
    group_index = torch.tensor([sample["group_index"] for sample in s.samples])
    lengths = torch.tensor([sample["length"] for sample in s.samples])
    loss_mask = (torch.arange(6) < lengths[:, None]).float()

    with torch.no_grad():
        advantages = rloo_advantages(rewards, group_index)
    log_probs = s.model(tokens[:, :-1]).log_softmax(-1).gather(-1, tokens[:, 1:, None]).squeeze(-1)
    loss = compute_rloo_loss(log_probs, advantages, loss_mask)

    s.optimizer.zero_grad()
    loss.backward()
    s.optimizer.step()
    return loss


if __name__ == "__main__":
    print("loss", run().item())
