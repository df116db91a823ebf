"""Trinity-RFT OPMD advantage: an aborted rollout comes back with reward -inf ("worse than anything").

Source: https://github.com/modelscope/Trinity-RFT (trinity/algorithm/advantage_fn/opmd_advantage.py, baseline "logavgexp"). The baseline
tau * (logsumexp(r / tau) - log n) is finite, because exp(-inf) = 0, so the group looks fine; but score = reward - baseline is -inf for the aborted
rollout, and times the action mask it is NaN on its padding.
Heals: a finite floor for the reward, leaving the rollout out, refusing the reward, an environment that reports a number. Tempting and useless:
another baseline (mean: now all of the group is lost), a larger tau.
"""

from types import SimpleNamespace

import torch
import torch.nn as nn

from expected import Expected

EXPECTED = Expected(
    phase=("input", "forward"),
    cause=("bad_input",),
    op=("any", "input"),
    index=(6,),
    masked=False,
    role=("rewards",),
    fix=("drop_invalid_sample", "clamp_input", "reject_input", "fix_upstream", "finite_mask_fill"),
    variable=("rewards",),
    line=("grouped = rewards.view(-1, repeat_times)",),
)


class Explorer(nn.Module):
    def __init__(self, vocab=22, dim=10):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.cell = nn.GRU(dim, dim, batch_first=True)
        self.head = nn.Linear(dim, vocab)

    def forward(self, tokens):
        hidden, _ = self.cell(self.embed(tokens))
        return self.head(hidden)


def opmd_advantages(rewards, action_mask, repeat_times, opmd_baseline, tau):
    with torch.no_grad():
        grouped = rewards.view(-1, repeat_times)
        if opmd_baseline == "mean":
            baseline = grouped.mean(dim=-1, keepdim=True)
        elif opmd_baseline == "logavgexp":
            count = torch.tensor(float(repeat_times))
            baseline = tau * (torch.logsumexp(grouped / tau, dim=-1, keepdim=True) - torch.log(count))
        else:
            raise NotImplementedError(opmd_baseline)
        scores = (grouped - baseline).reshape(-1, 1)
        return scores * action_mask, baseline


def opmd_loss(logprob, advantages, action_mask, tau):
    loss = -(advantages * logprob * action_mask).sum() / action_mask.sum()
    return loss / (1.0 + tau)


def build():
    torch.manual_seed(7)
    model = Explorer()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    tokens = torch.randint(1, 22, (8, 9))
    lengths = torch.tensor([6, 5, 6, 4, 6, 6, 3, 5])
    action_mask = (torch.arange(6)[None, :] < lengths[:, None]).float()
    rewards = torch.tensor([1.0, 0.0, 0.2, 1.0, 0.0, 0.6, float("-inf"), 1.0])  # sandbox 6 timed out
    return SimpleNamespace(
        model=model,
        optimizer=optimizer,
        tokens=tokens,
        action_mask=action_mask,
        rewards=rewards,
        repeat_times=4,
        opmd_baseline="logavgexp",
        tau=1.0,
    )


def run(s=None):
    s = s or build()
    advantages, s.baseline = opmd_advantages(s.rewards, s.action_mask, s.repeat_times, s.opmd_baseline, s.tau)
    logits = s.model(s.tokens[:, :-1])[:, -6:]
    logprob = logits.log_softmax(-1).gather(-1, s.tokens[:, -6:].unsqueeze(-1)).squeeze(-1)
    loss = opmd_loss(logprob, advantages, s.action_mask, s.tau)
    s.optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(s.model.parameters(), 1.0)
    s.optimizer.step()
    return loss
