"""verl #4200 (https://github.com/verl-project/verl/issues/4200): fp16 rollouts on an NPU; rollout_probs_diff and every rollout_corr metric are NaN.

The rollout engine returns NaN log-probabilities for a few tokens. They are only compared with the trainer's own (a debugging metric and the
perplexity of the rollout); the policy loss uses the log-probabilities that the actor recomputed. The report itself shows pg_loss 0.0156 and
grad_norm 0.083: the log is full of NaN and the training is healthy.
"""

from types import SimpleNamespace

import torch
import torch.nn as nn


class Actor(nn.Module):
    def __init__(self, vocab=20, hidden=12):
        super().__init__()
        self.embed = nn.Embedding(vocab, hidden)
        self.rnn = nn.GRU(hidden, hidden, batch_first=True)
        self.lm_head = nn.Linear(hidden, vocab)

    def forward(self, input_ids):
        return self.lm_head(self.rnn(self.embed(input_ids))[0])


def response_log_probs(actor, input_ids):
    logits = actor(input_ids[:, :-1])
    return logits.log_softmax(-1).gather(-1, input_ids[:, 1:, None]).squeeze(-1)


@torch.no_grad()
def calculate_debug_metrics(rollout_log_probs, actor_log_probs, response_mask):
    valid = response_mask.bool()
    diff = (rollout_log_probs.exp() - actor_log_probs.exp()).abs()[valid]
    log_ratio = (actor_log_probs - rollout_log_probs) * response_mask
    mean_log_ppl = -(rollout_log_probs * response_mask).sum(-1) / response_mask.sum(-1)
    return {
        "training/rollout_probs_diff_max": diff.max().item(),
        "training/rollout_probs_diff_mean": diff.mean().item(),
        "training/rollout_probs_diff_std": diff.std().item(),
        "rollout_corr/kl": (-log_ratio).sum().item() / response_mask.sum().item(),
        "rollout_corr/k3_kl": ((log_ratio.exp() - 1 - log_ratio) * response_mask).sum().item() / response_mask.sum().item(),
        "rollout_corr/rollout_ppl": mean_log_ppl.exp().mean().item(),
    }


def build():
    torch.manual_seed(511)
    actor = Actor()
    input_ids = torch.randint(0, 20, (4, 10))
    response_mask = torch.ones(4, 9)
    response_mask[:, :3] = 0
    response_mask[2, 7:] = 0
    with torch.no_grad():
        rollout_log_probs = response_log_probs(actor, input_ids) + 0.01 * torch.randn(4, 9)
    rollout_log_probs[1, 5] = float("nan")
    rollout_log_probs[3, 4:6] = float("nan")
    rewards = torch.tensor([1.0, 0.0, 1.0, 0.0])
    return SimpleNamespace(
        model=actor,
        input_ids=input_ids,
        response_mask=response_mask,
        rollout_log_probs=rollout_log_probs,
        rewards=rewards,
        metrics={},
        optimizer=torch.optim.AdamW(actor.parameters(), lr=1e-5),
    )


def run(s=None):
    s = s or build()
    with torch.no_grad():
        old_log_probs = response_log_probs(s.model, s.input_ids)
    s.metrics.update(calculate_debug_metrics(s.rollout_log_probs, old_log_probs, s.response_mask))
    advantages = ((s.rewards - s.rewards.mean()) / (s.rewards.std() + 1e-6))[:, None]
    for _ in range(2):
        log_prob = response_log_probs(s.model, s.input_ids)
        ratio = torch.exp((log_prob - old_log_probs).clamp(-20.0, 20.0))
        pg_losses = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(0.8, 1.2))
        pg_loss = (pg_losses * s.response_mask).sum() / s.response_mask.sum()
        s.optimizer.zero_grad()
        pg_loss.backward()
        s.metrics["actor/grad_norm"] = nn.utils.clip_grad_norm_(s.model.parameters(), 1.0).item()
        s.optimizer.step()
    return pg_loss


if __name__ == "__main__":
    run()
