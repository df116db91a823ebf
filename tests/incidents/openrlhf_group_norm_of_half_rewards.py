"""`group_norm` advantages of OpenRLHF's experience maker with rewards that a remote reward model returned as float16.

All four answers of one prompt have the same score: mean-centred 0, std 0. The guard is `std + 1e-9`, and 1e-9 is 0 in half precision:
0 / 0 = NaN for the whole group, and the loss is a mean over all groups.

Source: https://github.com/OpenRLHF/OpenRLHF/blob/main/openrlhf/trainer/ppo_utils/experience_maker.py (compute_advantages_and_returns, group_norm);
the symptom is https://github.com/OpenRLHF/OpenRLHF/issues/1120.
Heals: float32 rewards, an epsilon that half can hold, a floor of the std. Does not: clipping the rewards or the advantages (NaN stays NaN).
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
    fix=("representable_eps", "upcast_fp32", "clamp_denominator", "drop_invalid_sample"),
    variable=("rewards",),
    line=("rewards = (rewards - rewards.mean(-1, keepdim=True)) / (rewards.std(-1, keepdim=True) + 1e-9)",),
)


def compute_advantages(rewards, args, action_mask):
    rewards = rewards.clamp(min=args.reward_clip[0], max=args.reward_clip[1])
    rewards = rewards.reshape(-1, args.n_samples_per_prompt)
    rewards = (rewards - rewards.mean(-1, keepdim=True)) / (rewards.std(-1, keepdim=True) + 1e-9)
    returns = rewards.reshape(-1, 1).expand(action_mask.shape)
    return returns * action_mask


def policy_loss(log_probs, old_log_probs, advantages, action_mask, clip_eps=0.2):
    ratio = (log_probs - old_log_probs).exp()
    surr1 = ratio * advantages
    surr2 = ratio.clamp(1 - clip_eps, 1 + clip_eps) * advantages
    loss = -torch.min(surr1, surr2)
    return ((loss * action_mask).sum(-1) / action_mask.sum(-1)).mean()


def build():
    torch.manual_seed(7)
    model = nn.Sequential(nn.Embedding(14, 10), nn.Linear(10, 14))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    args = SimpleNamespace(n_samples_per_prompt=4, reward_clip=(-10.0, 10.0))
    sequences = torch.randint(0, 14, (12, 7))
    action_mask = torch.ones(12, 6)
    action_mask[[1, 5, 10], 4:] = 0
    rewards = torch.tensor([0.31, -1.2, 0.8, 2.4, 0.7, 0.7, 0.7, 0.7, -0.4, 1.9, 0.05, 0.6], dtype=torch.float16)
    return SimpleNamespace(
        model=model, optimizer=optimizer, args=args, batch={"sequences": sequences, "action_mask": action_mask, "rewards": rewards}
    )


def run(s=None):
    s = s or build()
    ids, mask = s.batch["sequences"], s.batch["action_mask"]

    def forward():
        return s.model(ids[:, :-1]).log_softmax(-1).gather(-1, ids[:, 1:].unsqueeze(-1)).squeeze(-1)

    old = forward().detach()
    advantages = compute_advantages(s.batch["rewards"], s.args, mask)
    for _ in range(2):
        loss = policy_loss(forward(), old, advantages, mask)
        s.optimizer.zero_grad()
        loss.backward()
        s.optimizer.step()
    return loss.item()


if __name__ == "__main__":
    print(run())
