"""GRPO-Zero, update_policy with the unused vocabulary rows at -inf - healthy.

compute_entropy multiplies probs by logits: 0 * -inf, the logged entropy is NaN on every token. It runs under no_grad and only goes to the log. The loss is a
cross entropy of real tokens, to which a -inf logit is nothing, and masked_fill blocks its gradient. (Source: policy-gradient/GRPO-Zero, grpo.py,
compute_entropy and update_policy.)
"""

from types import SimpleNamespace

import torch
from torch import nn


class Model(nn.Module):
    def __init__(self, vocab=20, used=17, dim=12):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.rnn = nn.GRU(dim, dim, batch_first=True)
        self.lm_head = nn.Linear(dim, vocab, bias=False)
        self.register_buffer("unused", torch.arange(vocab) >= used)

    def forward(self, ids):
        return self.lm_head(self.rnn(self.embed(ids))[0]).masked_fill(self.unused, float("-inf"))


def compute_entropy(logits):
    probs = torch.nn.functional.softmax(logits, dim=-1)
    entropy = torch.logsumexp(logits, dim=-1) - torch.sum(probs * logits, dim=-1)
    return entropy


def build():
    torch.manual_seed(6)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    ids = torch.randint(1, 17, (4, 8))
    masks = torch.ones(4, 8, dtype=torch.bool)
    masks[:, :3] = False
    masks[2, 6:] = False
    ids[2, 6:] = 0
    rewards = torch.tensor([1.1, 0.1, 0.0, 1.0])
    advantages = (rewards - rewards.mean()) / (rewards.std(unbiased=False) + 1e-4)
    return SimpleNamespace(model=model, optimizer=optimizer, batch=dict(ids=ids, masks=masks, advantages=advantages), log={})


def run(s=None):
    s = s or build()
    ids, target_masks = s.batch["ids"], s.batch["masks"][:, 1:]
    num_target_tokens = int(s.batch["masks"].sum())
    logits = s.model(ids[:, :-1]).float()
    log_probs = -torch.nn.functional.cross_entropy(
        logits.reshape(-1, logits.size(-1)),
        ids[:, 1:].reshape(-1),
        ignore_index=0,
        reduction="none",
    ).reshape(ids.shape[0], -1)
    with torch.no_grad():
        token_entropy = compute_entropy(logits)
        s.log["entropy"] = (token_entropy * target_masks).sum() / num_target_tokens
    obj = log_probs * s.batch["advantages"][:, None]
    obj = (obj * target_masks).sum() / num_target_tokens
    loss = -obj
    s.optimizer.zero_grad()
    loss.backward()
    s.log["grad_norm"] = torch.nn.utils.clip_grad_norm_(s.model.parameters(), max_norm=1.0)
    s.optimizer.step()
    return loss


if __name__ == "__main__":
    print(run())
