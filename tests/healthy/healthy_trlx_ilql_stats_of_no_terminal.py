"""trlx ILQL: get_tensor_stats divides by n, the number of actions; for a head without an action in this batch the statistics are NaN.

Source: https://github.com/CarperAI/trlx (trlx/utils/modeling.py, get_tensor_stats; trlx/models/modeling_ilql.py). The statistics keep their graph but
only go to the tracker; the losses divide by max(1, n). The -inf of the logit mask meets only a softmax. Healthy.
"""

from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F


def get_tensor_stats(xs, mask, n):
    mean = (xs * mask).sum() / n
    return dict(
        mean=mean,
        min=torch.where(mask.bool(), xs, float("inf")).min(),
        max=torch.where(mask.bool(), xs, float("-inf")).max(),
        std=torch.sqrt(((xs - mean) * mask).pow(2).sum() / n),
    )


class ILQLHeads(nn.Module):
    def __init__(self, vocab=14, dim=10):
        super().__init__()
        self.base = nn.Embedding(vocab, dim)
        self.lm_head, self.q_head, self.v_head = nn.Linear(dim, vocab), nn.Linear(dim, vocab), nn.Linear(dim, 1)
        self.register_buffer("logit_mask", torch.arange(vocab) >= 12)

    def forward(self, ids):
        h = self.base(ids)
        return self.lm_head(h).masked_fill(self.logit_mask, float("-inf")), self.q_head(h), self.v_head(h).squeeze(-1)


def ilql_loss(model, ids, rewards, dones, tau=0.7, gamma=0.99):
    logits, qs, vs = model(ids)
    actions = ids[:, 1:]
    q = qs[:, :-1].gather(-1, actions.unsqueeze(-1)).squeeze(-1)
    v, v_next = vs[:, :-1], vs[:, 1:].detach() * dones[:, 1:]
    terminal_mask = dones[:, :-1]
    n_nonterminal = max(1, int(terminal_mask.sum()))
    loss_q = ((q - (rewards + gamma * v_next)).pow(2) * terminal_mask).sum() / n_nonterminal
    diff = q.detach() - v
    loss_v = (torch.where(diff >= 0, tau, 1 - tau) * diff.pow(2) * terminal_mask).sum() / n_nonterminal
    loss_ce = (F.cross_entropy(logits[:, :-1].transpose(1, 2), actions, reduction="none") * terminal_mask).sum() / n_nonterminal
    ended = 1 - terminal_mask
    stats = {
        "qvalues/alive": get_tensor_stats(q, terminal_mask, terminal_mask.sum()),
        "qvalues/ended": get_tensor_stats(q, ended, ended.sum()),
    }
    return loss_q + loss_v + 0.1 * loss_ce, stats


def build():
    torch.manual_seed(6)
    model = ILQLHeads()
    ids = torch.randint(0, 12, (3, 8))
    rewards = torch.zeros(3, 7)
    rewards[:, -1] = torch.tensor([1.0, -0.5, 0.2])
    dones = torch.ones(3, 8)
    dones[:, -1] = 0
    return SimpleNamespace(model=model, ids=ids, rewards=rewards, dones=dones, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-4))


def run(s=None):
    s = s or build()
    loss, s.stats = ilql_loss(s.model, s.ids, s.rewards, s.dones)
    s.optimizer.zero_grad()
    loss.backward()
    s.optimizer.step()
    return loss
