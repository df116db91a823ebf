"""ms-swift, GRPO with scale_rewards='gdpo' where one reward function gave no score.

A reward model behind an API answered None for one completion, which is NaN in rewards_per_func. GDPO normalises every reward by itself with mean and std (the sum of
rewards of plain GRPO uses nansum), so its group is NaN, and the normalisation of the summed advantages over the batch spreads it to all samples.
(Source: modelscope/ms-swift, issue 8123, _compute_advantages of the GRPO trainer.) Heals: leaving the NaN out (nanmean, nan std, 0 for the missing one); scoring the
missing one as 0; dropping the sample from the group. Does not: a larger epsilon beside the std; nan_to_num on the final advantages keeps numbers finite but silences the
whole batch.
"""

from types import SimpleNamespace

import torch
from torch import nn

from expected import Expected

EXPECTED = Expected(
    phase=("input",),
    cause=("bad_input",),
    op=("mean", "select", "getitem"),
    index=(5, 1),
    masked=False,
    role=("rewards",),
    fix=("drop_invalid_sample", "fix_upstream", "mask_before_op", "reject_input", "clamp_input"),
    variable=("rewards_per_func",),
    line=(
        "grouped_reward_i = rewards_per_func[:, i].view(-1, num_generations)",
        'rewards_per_func[5, 1] = torch.tensor([r if r is not None else float("nan") for r in [None]])',
    ),
)


class TinyLM(nn.Module):
    def __init__(self, vocab=15, dim=14):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.rnn = nn.GRU(dim, dim, batch_first=True)
        self.lm_head = nn.Linear(dim, vocab)

    def forward(self, input_ids):
        return self.lm_head(self.rnn(self.embed(input_ids))[0])


def compute_advantages(rewards_per_func, reward_weights, num_generations):
    normalized = []
    for i in range(rewards_per_func.shape[1]):
        grouped_reward_i = rewards_per_func[:, i].view(-1, num_generations)
        group_mean = grouped_reward_i.mean(dim=1, keepdim=True)
        group_std = grouped_reward_i.std(dim=1, keepdim=True) + 1e-8
        normalized.append(((grouped_reward_i - group_mean) / group_std).view(-1))
    advantages = (torch.stack(normalized, dim=1) * reward_weights.unsqueeze(0)).sum(dim=1)
    return (advantages - advantages.mean()) / (advantages.std() + 1e-8)


def per_token_logps(model, input_ids, logits_to_keep):
    logits = model(input_ids)[:, -logits_to_keep - 1 : -1]
    return logits.log_softmax(-1).gather(-1, input_ids[:, -logits_to_keep:, None]).squeeze(-1)


def build():
    torch.manual_seed(21)
    model = TinyLM()
    input_ids = torch.randint(0, 15, (8, 10))
    completion_mask = torch.ones(8, 6)
    completion_mask[3, 4:] = 0
    completion_mask[6, 3:] = 0
    rewards_per_func = torch.stack([torch.tensor([1.0, 0, 0, 1, 0, 1, 1, 0]), torch.rand(8)], dim=1)
    rewards_per_func[5, 1] = torch.tensor([r if r is not None else float("nan") for r in [None]])
    return SimpleNamespace(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3),
        inputs={
            "input_ids": input_ids,
            "completion_mask": completion_mask,
            "old_per_token_logps": per_token_logps(model, input_ids, 6).detach(),
        },
        rewards_per_func=rewards_per_func,
        reward_weights=torch.tensor([1.0, 0.5]),
    )


def run(s=None):
    s = s or build()
    advantages = compute_advantages(s.rewards_per_func, s.reward_weights, num_generations=4)
    completion_mask = s.inputs["completion_mask"]
    logps = per_token_logps(s.model, s.inputs["input_ids"], completion_mask.shape[1])
    coef_1 = torch.exp(logps - s.inputs["old_per_token_logps"])
    coef_2 = torch.clamp(coef_1, 0.8, 1.2)
    per_token_loss = -torch.min(coef_1 * advantages.unsqueeze(1), coef_2 * advantages.unsqueeze(1))
    loss = ((per_token_loss * completion_mask).sum(-1) / completion_mask.sum(-1).clamp(min=1.0)).mean()
    s.optimizer.zero_grad()
    loss.backward()
    s.optimizer.step()
    return loss


if __name__ == "__main__":
    print(run())
