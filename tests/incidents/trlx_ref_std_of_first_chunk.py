"""trlX can scale rewards by the std of the very first chunk of scores (scale_reward="ref"), kept for the rest of the run.

chunk_size is 1 here, so the first chunk is one score: its std is NaN, and every reward of every later chunk is divided by it. The
running moments next to it are only logged: their batch std is NaN and their running std infinite in the first chunk, which hurts nobody.

Source: https://github.com/CarperAI/trlx/blob/main/trlx/trainer/accelerate_ppo_trainer.py (make_experience), trlx/utils/modeling.py
Heals: taking the reference of a chunk with more than one score (or std 1 for a single one). Does not: clipping the rewards
(cliprange_reward keeps NaN), nor an epsilon added to the std.
"""

from types import SimpleNamespace

import torch
import torch.nn as nn
from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("std_single",),
    op=("std",),
    index=(),
    masked=None,
    role=("rewards",),
    fix=("guard_small_group",),
    variable=("ref_std", "self.ref_std"),
    line=("self.ref_mean, self.ref_std = scores.mean(), scores.std()",),
)

PROMPT_LEN = 3


class RunningMoments:
    def __init__(self):
        self.mean, self.std, self.var, self.count = 0.0, 1.0, 1.0, 1e-24

    def update(self, xs):
        xs_count = xs.numel()
        xs_var, xs_mean = torch.var_mean(xs, unbiased=False)
        delta = xs_mean - self.mean
        tot_count = self.count + xs_count
        new_sum = xs_var * xs_count
        old_sum = self.var * self.count + delta**2 * self.count * xs_count / tot_count
        self.mean = self.mean + delta * xs_count / tot_count
        self.var = (old_sum + new_sum) / tot_count
        self.std = (self.var * tot_count / (tot_count - 1)).sqrt()
        self.count = tot_count
        return xs_mean, (xs_var * xs_count / (xs_count - 1)).sqrt()


class ActorCritic(nn.Module):
    def __init__(self, vocab=18, dim=12):
        super().__init__()
        self.wte = nn.Embedding(vocab, dim)
        self.rnn = nn.GRU(dim, dim, batch_first=True)
        self.lm_head = nn.Linear(dim, vocab)
        self.v_head = nn.Linear(dim, 1)

    def forward(self, ids):
        hidden, _ = self.rnn(self.wte(ids))
        return self.lm_head(hidden), self.v_head(hidden).squeeze(-1)


class PPOTrainer:
    def __init__(self, model, scale_reward="ref", cliprange_reward=10.0):
        self.model = model
        self.scale_reward, self.cliprange_reward = scale_reward, cliprange_reward
        self.running_moments = RunningMoments()
        self.ref_mean = self.ref_std = None
        self.stats = []

    @torch.no_grad()
    def make_experience(self, scores):
        if self.ref_mean is None:
            self.ref_mean, self.ref_std = scores.mean(), scores.std()
        all_scores_mean, all_scores_std = self.running_moments.update(scores)
        self.stats.append(dict(mean=all_scores_mean.item(), std=all_scores_std.item(), running=self.running_moments.std.item()))
        if self.scale_reward == "running":
            scores = scores / self.running_moments.std
        elif self.scale_reward == "ref":
            scores = scores / self.ref_std
        return torch.clip(scores, -self.cliprange_reward, self.cliprange_reward)

    def loss(self, ids, old_logprobs, rewards):
        logits, values = self.model(ids[:, :-1])
        logprobs = logits[:, PROMPT_LEN - 1 :].log_softmax(-1).gather(-1, ids[:, PROMPT_LEN:, None]).squeeze(-1)
        values = values[:, PROMPT_LEN - 1 :]
        returns = rewards.unsqueeze(1).expand_as(values)
        advantages = (returns - values).detach()
        ratio = torch.exp(logprobs - old_logprobs)
        pg_loss = torch.max(-advantages * ratio, -advantages * ratio.clamp(0.8, 1.2)).mean()
        return pg_loss + 0.5 * (values - returns).pow(2).mean()


def build():
    torch.manual_seed(2108)
    model = ActorCritic()
    ids = torch.randint(0, 18, (5, PROMPT_LEN + 4))
    with torch.no_grad():
        logits, _ = model(ids[:, :-1])
        old_logprobs = logits[:, PROMPT_LEN - 1 :].log_softmax(-1).gather(-1, ids[:, PROMPT_LEN:, None]).squeeze(-1)
    reward_model_scores = torch.tensor([0.31, -0.84, 1.92, 0.05, 0.77])
    return SimpleNamespace(
        model=model,
        trainer=PPOTrainer(model),
        ids=ids,
        old_logprobs=old_logprobs,
        scores=reward_model_scores,
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-4),
    )


def run(s=None):
    s = s or build()
    rewards = torch.cat([s.trainer.make_experience(chunk) for chunk in s.scores.split(1)])
    loss = s.trainer.loss(s.ids, s.old_logprobs, rewards)
    s.optimizer.zero_grad()
    loss.backward()
    s.optimizer.step()
    return loss
