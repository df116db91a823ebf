"""GRPO with num_generations = 1 ("to save memory"): the standard deviation within a group of one.

Rewards are viewed as (-1, num_generations) and the group's std(dim=1) is the unbiased one: with a single element it divides by n - 1 = 0 and is
NaN for every prompt.  The 1e-4 in the denominator cannot help; advantages, loss and reward_std are NaN from the first step.

Source: https://github.com/om-ai-lab/VLM-R1/issues/71 ("grad_norm and reward_std are nan: that is `--num_generations 1` ... num_generations must
be at least 2"), _generate_and_score of its grpo_trainer.py.
Heals: refusing the setting, or a spread of 0 (no scaling) for a group of one.  Does not: a larger epsilon beside the std, loss clipping.
"""

from types import SimpleNamespace

import torch
from torch import nn

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("std_single",),
    op=("std",),
    index=(0,),
    masked=False,
    role=("rewards", "advantages"),
    fix=("guard_small_group", "validate_config"),
    variable=("std_grouped_rewards",),
    line=("std_grouped_rewards = rewards.view(-1, num_generations).std(dim=1)",),
)


class TinyVLM(nn.Module):
    def __init__(self, vocab=40, dim=16, patch=12):
        super().__init__()
        self.vision = nn.Linear(patch, dim)
        self.embed = nn.Embedding(vocab, dim)
        self.rnn = nn.GRU(dim, dim, batch_first=True)
        self.lm_head = nn.Linear(dim, vocab, bias=False)

    def forward(self, pixels, ids):
        x = torch.cat([self.vision(pixels), self.embed(ids)], dim=1)
        h, _ = self.rnn(x)
        return self.lm_head(h[:, pixels.size(1) - 1 : -1])


def per_token_logps(model, pixels, ids):
    return model(pixels, ids).log_softmax(-1).gather(-1, ids.unsqueeze(-1)).squeeze(-1)


def group_advantages(rewards, num_generations):
    mean_grouped_rewards = rewards.view(-1, num_generations).mean(dim=1)
    std_grouped_rewards = rewards.view(-1, num_generations).std(dim=1)
    mean_grouped_rewards = mean_grouped_rewards.repeat_interleave(num_generations, dim=0)
    std_grouped_rewards = std_grouped_rewards.repeat_interleave(num_generations, dim=0)
    return (rewards - mean_grouped_rewards) / (std_grouped_rewards + 1e-4)


def build(num_generations=1):
    torch.manual_seed(71)
    model, ref = TinyVLM(), TinyVLM()
    ref.load_state_dict(model.state_dict())
    pixels = torch.randn(4, 3, 12)
    ids = torch.randint(0, 40, (4, 7))
    mask = torch.ones(4, 7)
    mask[0, 5:] = 0
    mask[3, 4:] = 0
    rewards = torch.tensor([0.71, 0.0, 0.42, 0.93]) + torch.tensor([1.0, 1.0, 0.0, 1.0])  # IoU + format
    return SimpleNamespace(
        model=model,
        ref=ref,
        num_generations=num_generations,
        beta=0.04,
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-4),
        batch={"pixels": pixels, "ids": ids, "mask": mask, "rewards": rewards},
    )


def run(s=None):
    s = s or build()
    b, out = s.batch, []
    for _ in range(2):
        logps = per_token_logps(s.model, b["pixels"], b["ids"])
        with torch.no_grad():
            ref_logps = per_token_logps(s.ref, b["pixels"], b["ids"])
            advantages = group_advantages(b["rewards"], s.num_generations)
        per_token_kl = torch.exp(ref_logps - logps) - (ref_logps - logps) - 1
        per_token_loss = -(torch.exp(logps - logps.detach()) * advantages.unsqueeze(1) - s.beta * per_token_kl)
        loss = ((per_token_loss * b["mask"]).sum(1) / b["mask"].sum(1)).mean()
        s.optimizer.zero_grad()
        loss.backward()
        s.optimizer.step()
        out.append(loss.item())
    return out


if __name__ == "__main__":
    print(run())
