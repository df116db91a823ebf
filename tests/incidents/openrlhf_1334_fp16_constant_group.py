"""Group-normalised rewards computed in the dtype of an fp16 reward model.

All answers to one prompt have the same score, so the group's std is 0; the guard 1e-9 is added in fp16, where it is 0 too, and
the centred rewards become 0 / 0. Every token of these answers gets a NaN advantage.
Source: https://github.com/OpenRLHF/OpenRLHF/pull/1334
Heals: promoting the rewards to fp32 before the statistics, an epsilon that fp16 can hold, or dropping constant groups.
Does not: 1e-9 -> 1e-8; the clip on the ratio; masking by the action mask.
"""

from types import SimpleNamespace

import torch
from torch import nn

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("eps_underflow", "zero_div_zero"),
    op=("div",),
    index=(1, 0),
    masked=False,
    role=("advantages", "rewards"),
    fix=("upcast_fp32", "representable_eps", "clamp_denominator", "drop_invalid_sample"),
    variable=("rewards",),
    line=("rewards = (rewards - baseline) / (rewards.std(-1, keepdim=True) + 1e-9)",),
)


class RewardModel(nn.Module):
    """Scores an answer by the tokens that it holds; frozen, fp16."""

    def __init__(self, vocab=24):
        super().__init__()
        self.score = nn.Embedding(vocab, 1)

    def forward(self, sequences):
        return self.score(sequences).squeeze(-1).amax(-1)


class Actor(nn.Module):
    def __init__(self, vocab=24, dim=16):
        super().__init__()
        self.wte = nn.Embedding(vocab, dim)
        self.lm_head = nn.Linear(dim, vocab, bias=False)

    def forward(self, sequences):
        logits = self.lm_head(self.wte(sequences[:, :-1]))
        return logits.log_softmax(-1).gather(-1, sequences[:, 1:, None]).squeeze(-1)


@torch.no_grad()
def process_experiences(rewards, n_samples_per_prompt):
    rewards = rewards.reshape(-1, n_samples_per_prompt)
    baseline = rewards.mean(-1, keepdim=True)
    rewards = (rewards - baseline) / (rewards.std(-1, keepdim=True) + 1e-9)
    return rewards.reshape(-1)


def build(n_samples_per_prompt=4):
    torch.manual_seed(2)
    actor, reward_model = Actor(), RewardModel().half().requires_grad_(False)
    sequences = torch.randint(0, 20, (12, 9))
    reward_model.score.weight[22] = 3.5
    sequences[4:8, 8] = 22  # every answer to the second prompt ends in the winning token
    action_mask = torch.ones(12, 8)
    action_mask[:, :3] = 0
    batch = dict(sequences=sequences, action_mask=action_mask, reward=reward_model(sequences), n_samples_per_prompt=n_samples_per_prompt)
    return SimpleNamespace(model=actor, optimizer=torch.optim.AdamW(actor.parameters(), lr=1e-3), batch=batch)


def run(s=None, clip_eps=0.2):
    s = s or build()
    b = s.batch
    advantages = process_experiences(b["reward"], b["n_samples_per_prompt"])
    advantages = advantages.float().unsqueeze(-1) * b["action_mask"]
    with torch.no_grad():
        old_action_log_probs = s.model(b["sequences"])
    for _ in range(2):
        action_log_probs = s.model(b["sequences"])
        ratio = (action_log_probs - old_action_log_probs).exp()
        surr1, surr2 = ratio * advantages, ratio.clamp(1 - clip_eps, 1 + clip_eps) * advantages
        loss = -(torch.min(surr1, surr2) * b["action_mask"]).sum() / b["action_mask"].sum()
        s.optimizer.zero_grad()
        loss.backward()
        s.optimizer.step()
    return loss.item(), s.model.wte.weight.isfinite().all().item()


if __name__ == "__main__":
    print(run())
