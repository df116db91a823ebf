"""TRL GRPOTrainer, several tasks in one batch - healthy: reward functions answer None for prompts of another task.

rewards_per_func holds NaN wherever a function does not apply; nansum over the functions leaves each completion the reward of its own task, and mean, std and advantages are finite.
Only the logged plain mean per function is NaN (the trainer logs nanmean beside it). (Source: huggingface/trl, GRPO documentation "Multi-task reward functions",
trl/trainer/grpo_trainer.py, _calculate_rewards.)
"""

from types import SimpleNamespace

import torch
import torch.nn as nn


class TinyLM(nn.Module):
    def __init__(self, vocab=16, dim=12):
        super().__init__()
        self.wte = nn.Embedding(vocab, dim)
        self.rnn = nn.GRU(dim, dim, batch_first=True)
        self.lm_head = nn.Linear(dim, vocab)

    def forward(self, ids):
        return self.lm_head(self.rnn(self.wte(ids))[0])


def math_reward_func(completion_ids, task):
    return [float(ids[-1] % 2) if t == "math" else None for ids, t in zip(completion_ids.tolist(), task)]


def coding_reward_func(completion_ids, task):
    return [float(ids[0] % 3) / 2 if t == "code" else None for ids, t in zip(completion_ids.tolist(), task)]


def per_token_logps(model, ids):
    return model(ids[:, :-1]).log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)


def build():
    torch.manual_seed(3)
    model = TinyLM()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    ids = torch.randint(1, 16, (8, 7))
    completion_mask = torch.ones(8, 6)
    completion_mask[:, :2] = 0
    task = ["math"] * 4 + ["code"] * 4
    with torch.no_grad():
        old = per_token_logps(model, ids) + 0.02 * torch.randn(8, 6)
    return SimpleNamespace(
        model=model,
        optimizer=optimizer,
        ids=ids,
        completion_mask=completion_mask,
        task=task,
        old_per_token_logps=old,
        reward_weights=torch.tensor([1.0, 0.5]),
        num_generations=4,
    )


def calculate_advantages(s):
    reward_funcs = [math_reward_func, coding_reward_func]
    rewards_per_func = torch.zeros(len(s.task), len(reward_funcs))
    for i, reward_func in enumerate(reward_funcs):
        output = reward_func(s.ids[:, 3:], s.task)
        output = [reward if reward is not None else torch.nan for reward in output]
        rewards_per_func[:, i] = torch.tensor(output, dtype=torch.float32)
    s.metrics = {"mean": rewards_per_func.mean(0), "nanmean": rewards_per_func.nanmean(0)}
    rewards = (rewards_per_func * s.reward_weights.unsqueeze(0)).nansum(dim=1)
    mean_grouped_rewards = rewards.view(-1, s.num_generations).mean(dim=1).repeat_interleave(s.num_generations, dim=0)
    std_rewards = rewards.view(-1, s.num_generations).std(dim=1).repeat_interleave(s.num_generations, dim=0)
    return (rewards - mean_grouped_rewards) / (std_rewards + 1e-4)


def run(s=None):
    s = s or build()
    advantages = calculate_advantages(s).unsqueeze(1)
    coef_1 = torch.exp(per_token_logps(s.model, s.ids) - s.old_per_token_logps)
    coef_2 = torch.clamp(coef_1, 0.8, 1.2)
    per_token_loss = -torch.min(coef_1 * advantages, coef_2 * advantages)
    loss = ((per_token_loss * s.completion_mask).sum(-1) / s.completion_mask.sum(-1).clamp(min=1.0)).mean()
    s.optimizer.zero_grad()
    loss.backward()
    s.optimizer.step()
    return loss


if __name__ == "__main__":
    print(run())
