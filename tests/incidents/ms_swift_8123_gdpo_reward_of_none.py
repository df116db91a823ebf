"""ms-swift #8123, GRPOTrainer with scale_rewards='gdpo' - one of two reward functions returned None for one completion.

None is kept as NaN in rewards_per_func. GRPO sums with nansum, but GDPO normalises each reward function for itself with mean and std, so that the group is NaN, and then the sum over the batch,
so that all advantages are. (Source: modelscope/ms-swift issue #8123, GRPOTrainer._compute_advantages.) Heals: nanmean and a std over the scored members, NaN advantages set to zero before the normalisation over the batch;
zero for the missing reward where the batch is made; leaving the group out; refusing the batch with an error; with less to learn from, nansum over the reward functions (the judge is lost for the group).
Does not: nan_to_num behind the normalisation over the batch (finite, but all advantages are zero and nobody learns), a greater eps, clipping the gradient norm.
"""

from types import SimpleNamespace

import torch
from torch import nn

from expected import Expected

EXPECTED = Expected(
    phase=("input",),
    cause=("bad_input",),
    op=("input",),
    index=(2, 1),
    masked=False,
    role=("rewards",),
    fix=("drop_invalid_sample", "fix_upstream", "mask_before_op", "where_on_detached", "reject_input"),
    variable=("rewards_per_func", "total_rewards_per_func"),
    line=(
        "reward_i = total_rewards_per_func[:, i]",
        "group_mean = grouped_reward_i.mean(dim=1, keepdim=True)",
        'advantages = compute_advantages(inputs["rewards_per_func"], s.reward_weights)',
        'rewards_per_func = torch.tensor([[a, float("nan") if j is None else j] for a, j in zip(accuracy, judge)])',
    ),
)

V, T, K = 12, 5, 4


class TinyLM(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed_tokens = nn.Embedding(V, 8)
        self.lm_head = nn.Linear(8, V)

    def forward(self, input_ids):
        return self.lm_head(self.embed_tokens(input_ids))


def compute_advantages(total_rewards_per_func, reward_weights):
    num_reward_funcs = total_rewards_per_func.shape[1]
    normalized_advantages_list = []
    for i in range(num_reward_funcs):
        reward_i = total_rewards_per_func[:, i]
        grouped_reward_i = reward_i.view(-1, K)
        group_mean = grouped_reward_i.mean(dim=1, keepdim=True)
        group_std = grouped_reward_i.std(dim=1, keepdim=True) + 1e-8
        normalized_i = (grouped_reward_i - group_mean) / group_std
        normalized_i = normalized_i.view(-1)
        normalized_advantages_list.append(reward_weights[i] * normalized_i)
    summed_advantages = sum(normalized_advantages_list)
    batch_mean = summed_advantages.mean()
    batch_std = summed_advantages.std() + 1e-8
    return (summed_advantages - batch_mean) / batch_std


def build():
    torch.manual_seed(21)
    model = TinyLM()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    input_ids = torch.randint(0, V, (2 * K, T + 1))
    completion_mask = torch.ones(2 * K, T)
    completion_mask[1, 3:] = 0
    completion_mask[6, 4:] = 0
    accuracy = [1.0, 0.0, 0.0, 1.0, 0.0, 1.0, 0.0, 0.0]
    judge = [0.7, 0.2, None, 0.9, 0.1, 0.8, 0.4, 0.3]
    rewards_per_func = torch.tensor([[a, float("nan") if j is None else j] for a, j in zip(accuracy, judge)])
    with torch.no_grad():
        old = model(input_ids[:, :-1]).log_softmax(-1).gather(-1, input_ids[:, 1:, None]).squeeze(-1)
    inputs = {"input_ids": input_ids, "completion_mask": completion_mask, "old_per_token_logps": old, "rewards_per_func": rewards_per_func}
    return SimpleNamespace(model=model, optimizer=optimizer, inputs=inputs, reward_weights=torch.ones(2))


def run(s=None, epsilon=0.2):
    s = s or build()
    inputs = s.inputs
    advantages = compute_advantages(inputs["rewards_per_func"], s.reward_weights)
    logits = s.model(inputs["input_ids"][:, :-1])
    per_token_logps = logits.log_softmax(-1).gather(-1, inputs["input_ids"][:, 1:, None]).squeeze(-1)
    coef_1 = torch.exp(per_token_logps - inputs["old_per_token_logps"])
    coef_2 = torch.clamp(coef_1, 1 - epsilon, 1 + epsilon)
    per_token_loss = -torch.min(coef_1 * advantages.unsqueeze(1), coef_2 * advantages.unsqueeze(1))
    completion_mask = inputs["completion_mask"]
    loss = ((per_token_loss * completion_mask).sum(-1) / completion_mask.sum(-1).clamp(min=1.0)).mean()
    s.optimizer.zero_grad()
    loss.backward()
    s.optimizer.step()
    return loss


if __name__ == "__main__":
    print(run())
