"""Healthy. verl with use_kl_in_reward and low_var_kl: the estimator overflows before it is capped, on constants.

The KL goes into the token-level rewards, nothing in it needs a gradient. The actor has collapsed on one answered token (log-prob -101 against -3 of the
reference): exp(98) is inf, inf - 98 - 1 is inf, and clamp(max=10) makes it 10, which is what the cap is for. Padding, where the reference worker reports 0
and the actor -92, runs into the same and is masked by multiplication only after the cap, 10 * 0 = 0. The same lines in the actor's KL *loss* would give NaN gradients;
here they are arithmetic on logged numbers. Rewards, advantages, loss, gradients are finite.
Source: https://github.com/verl-project/verl/issues/509 and #211 (apply_kl_penalty, the reward path), verl/trainer/ppo/core_algos.py (kl_penalty).
"""

import copy
from types import SimpleNamespace

import torch
from torch import nn


PAD = 0


class LM(nn.Module):
    def __init__(self, vocab=36, dim=18):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.mix = nn.GRU(dim, dim, batch_first=True)
        self.lm_head = nn.Linear(dim, vocab)

    def forward(self, ids):
        return self.lm_head(self.mix(self.embed(ids))[0])


def response_log_probs(model, ids, n):
    return model(ids)[:, -n - 1 : -1].log_softmax(-1).gather(-1, ids[:, -n:, None]).squeeze(-1)


def kl_penalty(logprob, ref_logprob):
    kl = ref_logprob - logprob
    ratio = torch.exp(kl)
    kld = ratio - kl - 1
    return torch.clamp(kld, min=-10, max=10)


@torch.no_grad()
def apply_kl_penalty(batch, kl_coef):
    kld = kl_penalty(batch["old_log_probs"], batch["ref_log_prob"])
    kld = kld * batch["response_mask"]
    token_level_rewards = batch["token_level_scores"] - kl_coef * kld
    current_kl = (kld.sum(-1) / batch["response_mask"].sum(-1)).mean()
    return token_level_rewards, current_kl.item()


@torch.no_grad()
def reinforce_plus_plus(token_level_rewards, response_mask, gamma=1.0):
    returns = torch.zeros_like(token_level_rewards)
    running = 0
    for t in reversed(range(token_level_rewards.shape[1])):
        running = token_level_rewards[:, t] + gamma * running
        returns[:, t] = running
        running = running * response_mask[:, t]
    n = response_mask.sum()
    mean = (returns * response_mask).sum() / n
    var = ((returns - mean).square() * response_mask).sum() / (n - 1)
    return (returns - mean) * torch.rsqrt(var + 1e-8) * response_mask


def build():
    torch.manual_seed(77)
    actor = LM()
    ref = copy.deepcopy(actor).requires_grad_(False)
    with torch.no_grad():
        actor.lm_head.bias[PAD] -= 89.0
        actor.lm_head.bias[35] -= 97.5
    optimizer = torch.optim.AdamW(actor.parameters(), lr=1e-5)
    ids = torch.randint(1, 35, (5, 13))
    ids[1, 8] = 35
    lengths = torch.tensor([8, 8, 5, 6, 8])
    response_mask = (torch.arange(8)[None] < lengths[:, None]).float()
    ids[:, 5:][response_mask == 0] = PAD
    scores = torch.zeros(5, 8)
    scores[torch.arange(5), lengths - 1] = torch.tensor([1.0, 0.0, 0.0, 1.0, 1.0])
    with torch.no_grad():
        old_log_probs = response_log_probs(actor, ids, 8)
        ref_log_prob = response_log_probs(ref, ids, 8) * response_mask
    batch = dict(ids=ids, response_mask=response_mask, token_level_scores=scores, old_log_probs=old_log_probs, ref_log_prob=ref_log_prob)
    return SimpleNamespace(model=actor, optimizer=optimizer, batch=batch)


def run(s=None):
    s = s or build()
    b = s.batch
    rewards, current_kl = apply_kl_penalty(b, kl_coef=0.01)
    advantages = reinforce_plus_plus(rewards, b["response_mask"])
    losses = []
    for _ in range(2):
        log_prob = response_log_probs(s.model, b["ids"], 8)
        ratio = torch.exp(log_prob - b["old_log_probs"])
        pg = torch.max(-advantages * ratio, -advantages * ratio.clamp(0.8, 1.2))
        loss = (pg * b["response_mask"]).sum() / b["response_mask"].sum()
        s.optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(s.model.parameters(), 1.0)
        s.optimizer.step()
        losses.append(loss.item())
    return losses, current_kl


if __name__ == "__main__":
    print(run())
