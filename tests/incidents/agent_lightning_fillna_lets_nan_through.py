"""microsoft/agent-lightning, the VERL daemon (https://github.com/microsoft/agent-lightning/blob/main/agentlightning/verl/daemon.py, _fillna_reward).

A rollout without a reward (None) gets a default. This agent's judge reports float("nan") when it times out, which is not None, so the NaN goes
into the reward tensor, through the group's mean and deviation into all four advantages of its task, and by the sum into every weight. Checking
rewards for NaN where they enter, or leaving that rollout out, heals it. An epsilon in the group's deviation or clipping the advantages does
not, and neither does clipping the gradient norm.
"""

from types import SimpleNamespace
from typing import Optional

import torch
import torch.nn as nn

from expected import Expected

EXPECTED = Expected(
    phase=("input",),
    cause=("bad_input",),
    op=("any",),
    index=(5,),
    masked=False,
    role=("rewards",),
    fix=("reject_input", "drop_invalid_sample", "fix_upstream", "mask_before_op"),
    variable=("rewards", "final_reward"),
    line=('rewards = torch.tensor([fillna_reward(r["final_reward"]) for r in s.rollouts])',),
)


class Policy(nn.Module):
    def __init__(self, vocab=22, hidden=12):
        super().__init__()
        self.embed = nn.Embedding(vocab, hidden)
        self.norm = nn.RMSNorm(hidden)
        self.lm_head = nn.Linear(hidden, vocab, bias=False)

    def forward(self, input_ids):
        return self.lm_head(self.norm(self.embed(input_ids)))


def fillna_reward(final_reward: Optional[float], fillna_value: float = 0.0) -> float:
    if final_reward is None:
        return fillna_value
    return final_reward


def compute_grpo_outcome_advantage(rewards, uid, epsilon=1e-6):
    advantages = torch.zeros_like(rewards)
    for task in uid.unique():
        members = uid == task
        group = rewards[members]
        advantages[members] = (group - group.mean()) / (group.std() + epsilon)
    return advantages


def pad_triplets(rollouts, max_response_length=7):
    responses = torch.zeros(len(rollouts), max_response_length, dtype=torch.long)
    mask = torch.zeros(len(rollouts), max_response_length)
    for i, rollout in enumerate(rollouts):
        ids = rollout["response_ids"]
        responses[i, : len(ids)] = ids
        mask[i, : len(ids)] = 1
    return responses, mask


def build():
    torch.manual_seed(508)
    policy = Policy()
    final_rewards = [1.0, 0.0, None, 1.0, 0.0, float("nan"), 1.0, 0.0]
    lengths = [6, 7, 3, 5, 7, 4, 6, 5]
    rollouts = [
        dict(uid=i // 4, final_reward=reward, response_ids=torch.randint(1, 22, (length,)))
        for i, (reward, length) in enumerate(zip(final_rewards, lengths))
    ]
    return SimpleNamespace(model=policy, rollouts=rollouts, optimizer=torch.optim.AdamW(policy.parameters(), lr=1e-6))


def run(s=None):
    s = s or build()
    rewards = torch.tensor([fillna_reward(r["final_reward"]) for r in s.rollouts])
    uid = torch.tensor([r["uid"] for r in s.rollouts])
    advantages = compute_grpo_outcome_advantage(rewards, uid).unsqueeze(-1)
    responses, mask = pad_triplets(s.rollouts)
    log_prob = s.model(responses[:, :-1]).log_softmax(-1).gather(-1, responses[:, 1:, None]).squeeze(-1)
    ratio = torch.exp(log_prob - log_prob.detach())
    mask = mask[:, 1:]
    loss = -(torch.minimum(advantages * ratio, advantages * ratio.clamp(0.8, 1.2)) * mask).sum() / mask.sum()
    s.optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(s.model.parameters(), 1.0)
    s.optimizer.step()
    return loss


if __name__ == "__main__":
    run()
