"""PRIME trains its implicit process reward model with BCE on sigmoid(beta * sum of log-ratios). A long wrong answer has a score of about 130: the sigmoid
is exactly 1 against a label of 0. binary_cross_entropy bounds its logarithm at -100 and its gradient meets the zero slope of the sigmoid: that
sample teaches nothing, the others do, and everything stays finite.

Source: https://github.com/PRIME-RL/PRIME prime_core_algos.py, compute_ce_dpo_loss_rm.
"""

from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F


class ImplicitPRM(nn.Module):
    def __init__(self, vocab=16, dim=8):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.lm_head = nn.Linear(dim, vocab)

    def forward(self, ids):
        return self.lm_head(torch.tanh(self.embed(ids)))


def token_log_probs(model, ids):
    return model(ids[:, :-1]).log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)


def compute_ce_dpo_loss_rm(token_level_scores, acc, response_mask, beta):
    cur_scores = ((token_level_scores * response_mask).sum(dim=1) * beta).sigmoid()
    return F.binary_cross_entropy(cur_scores, acc)


def build():
    torch.manual_seed(58)
    model = ImplicitPRM()
    ids = torch.randint(0, 16, (4, 21))
    acc = torch.tensor([1.0, 0.0, 0.0, 1.0])
    response_mask = torch.ones(4, 20)
    response_mask[0, 8:] = 0
    response_mask[1, 12:] = 0
    response_mask[3, 10:] = 0
    with torch.no_grad():
        ref_log_probs = token_log_probs(model, ids) + 0.1 * torch.randn(4, 20)
        ref_log_probs[2] -= 130.0  # the reference model finds this answer absurd, token by token
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    return SimpleNamespace(model=model, optimizer=optimizer, ids=ids, acc=acc, response_mask=response_mask, ref_log_probs=ref_log_probs)


def run(s=None, beta_train=0.05):
    s = s or build()
    token_level_scores = token_log_probs(s.model, s.ids) - s.ref_log_probs
    loss = compute_ce_dpo_loss_rm(token_level_scores, s.acc, s.response_mask, beta_train)
    s.optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(s.model.parameters(), 10.0)
    s.optimizer.step()
    return loss


if __name__ == "__main__":
    print("loss", run().item())
