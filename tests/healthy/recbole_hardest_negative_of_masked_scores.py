"""RecBole, full-sort scores with the history at -inf, hardest negatives picked from them - BPR of the picked items.

The score matrix holds -inf at the padding item and at all items of a user's history, a margin of infinite scores is even NaN in the log. (Source: RUCAIBox/RecBole, trainer.py, _full_sort_batch_eval
and sampler with dynamic negatives.) Healthy: only the indices of the best items leave the no_grad block, and these are never masked ones; the loss scores them anew.
"""

from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import nn

USERS, ITEMS = 4, 9


class BPR(nn.Module):
    def __init__(self, embedding_size=6):
        super().__init__()
        self.user_embedding = nn.Embedding(USERS, embedding_size)
        self.item_embedding = nn.Embedding(ITEMS, embedding_size, padding_idx=0)

    def full_sort_predict(self, user):
        return self.user_embedding(user) @ self.item_embedding.weight.T

    def forward(self, user, item):
        return (self.user_embedding(user) * self.item_embedding(item)).sum(dim=1)


def build():
    torch.manual_seed(4)
    model = BPR()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    history_index = (torch.tensor([0, 0, 1, 2, 2, 2, 2, 2, 2, 2, 3]), torch.tensor([1, 4, 2, 1, 2, 3, 4, 5, 6, 7, 8]))
    batch = SimpleNamespace(user=torch.tensor([0, 1, 2, 3]), positive=torch.tensor([4, 2, 6, 8]))
    return SimpleNamespace(model=model, optimizer=optimizer, history_index=history_index, batch=batch, log=[])


def run(s=None):
    s = s or build()
    for _ in range(3):
        with torch.no_grad():
            scores = s.model.full_sort_predict(torch.arange(USERS))
            scores[:, 0] = -torch.inf
            scores[s.history_index] = -torch.inf
            top = scores.topk(2, dim=1)
            s.log.append(
                {
                    "spread": (top.values[:, 0] - scores.min(dim=1).values).mean(),
                    "second": (top.values[:, 1] - scores.min(dim=1).values).mean(),
                }
            )
            negative = scores[s.batch.user].argmax(dim=1)
        pos, neg = s.model(s.batch.user, s.batch.positive), s.model(s.batch.user, negative)
        loss = -F.logsigmoid(pos - neg).mean()
        s.optimizer.zero_grad()
        loss.backward()
        s.optimizer.step()
    return loss


if __name__ == "__main__":
    print(run())
