"""oat PR #62, truncated importance sampling between the actors' and the learner's precision - one token with an infinite weight before the truncation.

The rollout engine in low precision logged -98 for one token, exp of the difference is inf and so is its logged maximum. (Source: sail-sg/oat PR #62, PPO learner with truncated importance sampling.)
Healthy: the weight carries no gradient (both log probabilities are of fixed policies) and is truncated at 2 before it meets the loss; the padding's NaN from the rollout is taken out with torch.where before the difference.
"""

from types import SimpleNamespace

import torch
from torch import nn

VOCAB = 11


class TinyLM(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, 12)
        self.lm_head = nn.Linear(12, VOCAB)

    def forward(self, input_ids):
        return self.lm_head(self.embed(input_ids))


def get_batch_logps(logits, ids):
    return logits.log_softmax(-1).gather(-1, ids.unsqueeze(-1)).squeeze(-1)


def masked_mean(values, mask):
    return (values * mask).sum() / mask.sum()


def build():
    torch.manual_seed(6)
    model = TinyLM()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    input_ids = torch.randint(0, VOCAB, (4, 8))
    response_masks = torch.ones(4, 7)
    response_masks[:, :2] = 0
    response_masks[2, 5:] = 0
    with torch.no_grad():
        logps = get_batch_logps(model(input_ids[:, :-1]), input_ids[:, 1:])
    actor_logps = logps + 0.02 * torch.randn(4, 7)
    actor_logps[1, 4] = -98.0
    actor_logps[2, 5:] = float("nan")
    return SimpleNamespace(
        model=model,
        optimizer=optimizer,
        input_ids=input_ids,
        response_masks=response_masks,
        logps=logps,
        actor_logps=actor_logps,
        advantages=torch.tensor([0.9, -0.4, 0.7, -1.2]),
        infos=[],
    )


def run(s=None, cliprange=0.2, truncated_importance_sampling_cap=2.0):
    s = s or build()
    mask = s.response_masks
    actor_logps = torch.where(mask.bool(), s.actor_logps, s.logps)
    for _ in range(2):
        new_logps = get_batch_logps(s.model(s.input_ids[:, :-1]), s.input_ids[:, 1:])
        ratio = torch.exp(new_logps - s.logps)
        advantages = s.advantages[:, None]
        pg_losses = torch.max(-advantages * ratio, -advantages * torch.clamp(ratio, 1.0 - cliprange, 1.0 + cliprange))
        with torch.no_grad():
            importance_weight = torch.exp(s.logps - actor_logps)
            s.infos.append({"is_weight_max": importance_weight.max(), "is_weight_mean": masked_mean(importance_weight, mask)})
            importance_weight = torch.clamp(importance_weight, max=truncated_importance_sampling_cap)
        loss = masked_mean(pg_losses * importance_weight, mask)
        s.optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(s.model.parameters(), 1.0)
        s.optimizer.step()
    return loss


if __name__ == "__main__":
    print(run())
