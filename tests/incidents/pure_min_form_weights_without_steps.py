"""PURE's min-form credit assignment: the process rewards of a response are weighted by softmax(-r / T) over its step separators. One response never
writes a separator, its row is -inf everywhere and the softmax is NaN; the baseline over the other answers spreads it to the whole batch.

Source: https://github.com/CJReinforce/PURE openrlhf/utils/utils.py, turn_process_reward_logits_to_reward. Heals: a finite fill, zero weights for
rows without a step, or leaving such a response out. Raising the temperature or masking the weighted reward does not.
"""

from types import SimpleNamespace

import torch
import torch.nn as nn

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("fully_masked_softmax",),
    op=("softmax", "_softmax"),
    index=(2, 0),
    masked=None,
    role=("rewards", "advantages"),
    fix=("finite_mask_fill", "safe_softmax", "guard_empty", "drop_invalid_sample"),
    variable=("weight",),
    line=("weight = torch.softmax(-masked_reward / temperature, dim=-1)",),
)

STEP_TOKEN = 1


class Trunk(nn.Module):
    def __init__(self, vocab, dim, out):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.rnn = nn.GRU(dim, dim, batch_first=True)
        self.head = nn.Linear(dim, out)

    def forward(self, ids):
        return self.head(self.rnn(self.embed(ids))[0])


def turn_process_reward_logits_to_reward(logits, reward_mask, temperature=0.1):
    probs = logits.softmax(dim=-1)
    process_reward = (probs[..., 1] - probs[..., 0]).masked_fill(~reward_mask, 0.0)
    masked_reward = process_reward.masked_fill(~reward_mask, float("inf"))
    weight = torch.softmax(-masked_reward / temperature, dim=-1)
    return weight * process_reward


def compute_returns(process_reward, action_mask):
    returns = process_reward.flip(-1).cumsum(-1).flip(-1)
    outcome = process_reward.sum(-1)
    baseline = (outcome.sum() - outcome) / (len(outcome) - 1)
    return (returns - baseline[:, None]) * action_mask


def policy_loss(log_probs, old_log_probs, advantages, action_mask, clip_eps=0.2):
    ratio = (log_probs - old_log_probs).exp()
    surr = torch.min(ratio * advantages, ratio.clamp(1 - clip_eps, 1 + clip_eps) * advantages)
    return -((surr * action_mask).sum(-1) / action_mask.sum(-1)).mean()


def build():
    torch.manual_seed(6)
    actor, prm = Trunk(16, 8, 16), Trunk(16, 8, 2).requires_grad_(False)
    sequences = torch.randint(2, 16, (4, 9))
    for row, positions in enumerate([(3, 7), (2, 5, 8), (), (4, 8)]):
        sequences[row, list(positions)] = STEP_TOKEN
    action_mask = torch.ones(4, 8)
    action_mask[1, 7:] = 0
    return SimpleNamespace(
        model=actor, prm=prm, sequences=sequences, action_mask=action_mask, optimizer=torch.optim.AdamW(actor.parameters(), lr=1e-3)
    )


def action_log_probs(model, sequences):
    return model(sequences[:, :-1]).log_softmax(-1).gather(-1, sequences[:, 1:, None]).squeeze(-1)


def make_experience(s):
    with torch.no_grad():
        old_log_probs = action_log_probs(s.model, s.sequences)
        actions = s.sequences[:, 1:]
        reward_mask = (actions == STEP_TOKEN) & s.action_mask.bool()
        process_reward = turn_process_reward_logits_to_reward(s.prm(s.sequences)[:, 1:], reward_mask)
        advantages = compute_returns(process_reward, s.action_mask)
    return old_log_probs, advantages


def run(s=None):
    s = s or build()
    old_log_probs, advantages = make_experience(s)
    loss = policy_loss(action_log_probs(s.model, s.sequences), old_log_probs, advantages, s.action_mask)
    s.optimizer.zero_grad()
    loss.backward()
    s.optimizer.step()
    return loss


if __name__ == "__main__":
    print("loss", run().item())
