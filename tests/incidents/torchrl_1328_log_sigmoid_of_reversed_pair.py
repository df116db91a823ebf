"""torchrl, pairwise reward loss of GPT2RewardModel - log(sigmoid(x)) of a pair that is far the wrong way round.

The reward head scores one token of a rejected answer more than 100 above the chosen one; sigmoid gives exactly 0 and its log -inf, the mean over the suffix and the loss are
inf, the gradient NaN (0 * inf). Source: https://github.com/pytorch/rl/pull/1328, torchrl/modules/models/rlhf.py, compute_reward_loss (review of the line `-torch.log(torch.sigmoid(`).
Heals: F.logsigmoid of the difference (what the project does today); clamping the sigmoid at 1e-8 or adding 1e-8 to it; clamping the difference to [-50, 50]. Does not: float() (is float32).
"""

from types import SimpleNamespace

import torch
import torch.nn as nn

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("log_zero",),
    op=("log",),
    index=(1,),
    masked=None,
    role=("loss", "rewards", "log_probs"),
    fix=("stable_function", "clamp_input", "representable_eps", "clamp_exponent", "avoid_singular_op"),
    variable=(None,),
    line=("loss += -torch.log(torch.sigmoid(c_truncated_reward - r_truncated_reward)).mean()",),
)


class GPT2RewardModel(nn.Module):
    def __init__(self, vocab=50, n_embd=16, pad_token_id=0):
        super().__init__()
        self.transformer = nn.Sequential(nn.Embedding(vocab, n_embd), nn.Linear(n_embd, n_embd), nn.GELU())
        self.lm_head = nn.Linear(n_embd, 1, bias=False)
        self.pad_id = pad_token_id

    def forward(self, input_ids):
        rewards = self.lm_head(self.transformer(input_ids)).squeeze(-1)
        return SimpleNamespace(input_ids=input_ids, rewards=rewards)

    @staticmethod
    def compute_reward_loss(chosen_batch, rejected_batch, pad_token_id=0):
        chosen_ids = chosen_batch.input_ids
        rejected_ids = rejected_batch.input_ids
        chosen_rewards = chosen_batch.rewards
        rejected_rewards = rejected_batch.rewards

        bs = chosen_rewards.shape[0]
        loss = 0

        for i in range(bs):
            # Check if there is any padding otherwise take length of sequence
            c_inds = (chosen_ids[i] == pad_token_id).nonzero()
            c_ind = c_inds[0].item() if len(c_inds) > 0 else chosen_ids.shape[1]
            r_inds = (rejected_ids[i] == pad_token_id).nonzero()
            r_ind = r_inds[0].item() if len(r_inds) > 0 else rejected_ids.shape[1]
            end_ind = max(c_ind, r_ind)

            # Retrieve first index where trajectories diverge
            divergence_ind = (chosen_ids[i] != rejected_ids[i]).nonzero()[0]

            # Index into the correct rewards
            c_truncated_reward = chosen_rewards[i][divergence_ind:end_ind]
            r_truncated_reward = rejected_rewards[i][divergence_ind:end_ind]

            # Compute loss based on the chosen and rejected rewards
            loss += -torch.log(torch.sigmoid(c_truncated_reward - r_truncated_reward)).mean()

        return loss / bs


def build():
    torch.manual_seed(5)
    model = GPT2RewardModel()
    prompt = torch.randint(2, 50, (3, 4))
    chosen = torch.cat([prompt, torch.randint(2, 50, (3, 5))], 1)
    rejected = torch.cat([prompt, torch.randint(2, 50, (3, 5))], 1)
    rejected[:, 4] = (chosen[:, 4] - 1).clamp(min=2) + (chosen[:, 4] == 2).long()
    rejected[2, 5] = 1
    rejected[0, 7:] = 0
    with torch.no_grad():
        direction = model.lm_head.weight[0].sign()
        model.transformer[0].weight[1] = torch.linalg.solve(model.transformer[1].weight, 100.0 * direction.clamp(min=0))
        model.lm_head.weight.mul_(3.0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    return SimpleNamespace(model=model, optimizer=optimizer, chosen=chosen, rejected=rejected)


def run(s=None):
    s = s or build()
    chosen_batch = s.model(s.chosen)
    rejected_batch = s.model(s.rejected)
    loss = s.model.compute_reward_loss(chosen_batch, rejected_batch)
    s.optimizer.zero_grad()
    loss.backward()
    s.optimizer.step()
    return loss


if __name__ == "__main__":
    print(run())
