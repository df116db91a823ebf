"""GRPO with a dynamic number of samples: rewards are grouped by prompt id, groups may have any size.

Multi-turn splitting and deduplication by request id left one prompt with a single sample. Tensor.std of one element is NaN
(n - 1 = 0), and so is the advantage of this sample; 1e-4 does not help.
Source: https://github.com/modelscope/ms-swift/pull/5619 (compute_std, _compute_advantages with dynamic_num_samples)
Heals: std 0 for groups of one (or unbiased=False); leaving the group out.
Does not: a larger epsilon; normalising in fp64; the completion mask.
"""

from types import SimpleNamespace

import torch
from torch import nn

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("std_single",),
    op=("std",),
    index=(),
    masked=None,
    role=("advantages", "rewards"),
    fix=("guard_small_group", "drop_invalid_sample"),
    variable=(None, "prompt_stds"),
    line=("prompt_stds[idx_tensor] = r_group.std()",),
)


class Policy(nn.Module):
    def __init__(self, vocab=30, dim=16):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.fc = nn.Linear(dim, dim)
        self.lm_head = nn.Linear(dim, vocab, bias=False)

    def forward(self, input_ids):
        logits = self.lm_head(torch.tanh(self.fc(self.embed(input_ids[:, :-1]))))
        return logits.log_softmax(-1).gather(-1, input_ids[:, 1:, None]).squeeze(-1)


@torch.no_grad()
def compute_advantages(request_ids, prompt_ids, rewards):
    seen, unique_indices = {}, []
    for i, rid in enumerate(request_ids):
        if rid not in seen:
            seen[rid] = len(unique_indices)
            unique_indices.append(i)
    unique_rewards = rewards[torch.tensor(unique_indices)]
    prompt_to_indices = {}
    for k, i in enumerate(unique_indices):
        prompt_to_indices.setdefault(prompt_ids[i], []).append(k)

    prompt_means, prompt_stds = torch.zeros_like(unique_rewards), torch.zeros_like(unique_rewards)
    for idxs in prompt_to_indices.values():
        idx_tensor = torch.tensor(idxs)
        r_group = unique_rewards[idx_tensor]
        prompt_means[idx_tensor] = r_group.mean()
        prompt_stds[idx_tensor] = r_group.std()
    unique_advantages = (unique_rewards - prompt_means) / (prompt_stds + 1e-4)
    return unique_advantages[torch.tensor([seen[rid] for rid in request_ids])]


def build():
    torch.manual_seed(12)
    model = Policy()
    request_ids = ["r0", "r1", "r1", "r2", "r3", "r3", "r4", "r5"]  # r1 and r3 were split into two turns
    prompt_ids = ["p0", "p0", "p0", "p0", "p1", "p1", "p2", "p2"]  # p1 has one request only
    batch = dict(
        input_ids=torch.randint(0, 30, (8, 7)),
        request_ids=request_ids,
        prompt_ids=prompt_ids,
        rewards=torch.tensor([1.0, 0.0, 0.0, 1.0, 0.5, 0.5, 0.0, 1.0]),
    )
    return SimpleNamespace(model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3), batch=batch)


def run(s=None):
    s = s or build()
    b = s.batch
    advantages = compute_advantages(b["request_ids"], b["prompt_ids"], b["rewards"])
    for _ in range(2):
        per_token_logps = s.model(b["input_ids"])
        coef_1 = torch.exp(per_token_logps - per_token_logps.detach())
        loss = -(coef_1 * advantages.unsqueeze(1)).mean()
        s.optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(s.model.parameters(), 1.0)
        s.optimizer.step()
    return loss.item(), s.model.lm_head.weight.isfinite().all().item()


if __name__ == "__main__":
    print(run())
