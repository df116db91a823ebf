"""Rollouts by speculative sampling: the residual max(p - q, 0) / sum of positions where draft and policy agree exactly is 0 / 0. Looks broken, is healthy.

The draft head is a copy of the policy's head from the last sync, and for some contexts (the untouched rows) both distributions are the same numbers: their
residual is NaN. But then p / q is 1 and the draft token is always accepted; torch.where takes the resampled token only at rejected positions, tokens are
integers, and all of it runs under no_grad. The stored behaviour log-probs come from p, and the PPO step is ordinary.
Source: https://github.com/vllm-project/vllm/pull/2336 (recovered_probs = f / sum(f), reviewed for division by zero) and https://github.com/duoan/TorchCode/issues/16
("if they are identical ... the token would never be rejected")
"""

from copy import deepcopy
from types import SimpleNamespace

import torch
from torch import nn


VOCAB = 24


class Policy(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, width)
        self.head = nn.Linear(width, VOCAB)

    def forward(self, ids):
        return self.head(torch.tanh(self.embed(ids)))


@torch.no_grad()
def speculative_step(policy, draft, ids):
    target_probs = policy(ids).softmax(-1)
    draft_probs = draft(ids).softmax(-1)
    draft_token = torch.multinomial(draft_probs.flatten(0, 1), 1).view(ids.shape)
    p = target_probs.gather(-1, draft_token[..., None]).squeeze(-1)
    q = draft_probs.gather(-1, draft_token[..., None]).squeeze(-1)
    accepted = torch.rand_like(p) < (p / q).clamp(max=1.0)
    difference = (target_probs - draft_probs).clamp(min=0)
    recovered_probs = difference / difference.sum(-1, keepdim=True)
    # Gumbel-max draw, as the fused samplers do it: no check of the probabilities
    recovered = (recovered_probs / torch.empty_like(recovered_probs).exponential_(1)).argmax(-1)
    tokens = torch.where(accepted, draft_token, recovered)
    log_probs = target_probs.gather(-1, tokens[..., None]).squeeze(-1).log()
    return tokens, log_probs, accepted


def build():
    torch.manual_seed(17)
    policy = Policy()
    draft = deepcopy(policy).requires_grad_(False)
    with torch.no_grad():
        policy.embed.weight[12:] += 0.4 * torch.randn(12, 16)  # contexts that were trained since the last sync
    batch = {"prompts": torch.randint(0, VOCAB, (6, 10)), "advantages": torch.randn(6, 1)}
    return SimpleNamespace(model=policy, draft=draft, optimizer=torch.optim.AdamW(policy.parameters(), lr=2e-3), batch=batch)


def run(s=None):
    s = s or build()
    prompts, advantages = s.batch["prompts"], s.batch["advantages"]
    torch.manual_seed(18)
    tokens, old_log_probs, accepted = speculative_step(s.model, s.draft, prompts)
    losses = []
    for _ in range(3):
        log_probs = s.model(prompts).log_softmax(-1).gather(-1, tokens[..., None]).squeeze(-1)
        ratio = (log_probs - old_log_probs).exp()
        loss = torch.max(-advantages * ratio, -advantages * ratio.clamp(0.8, 1.2)).mean()
        s.optimizer.zero_grad()
        loss.backward()
        s.optimizer.step()
        losses.append(loss.item())
    finite = all(p.isfinite().all().item() for p in s.model.parameters())
    return {"losses": losses, "accepted": accepted.float().mean().item(), "weights_finite": finite}


if __name__ == "__main__":
    print(run())
