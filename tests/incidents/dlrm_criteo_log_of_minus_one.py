"""facebookresearch/dlrm, Criteo - dense counts were stored as log(x + 1), and a count of -1 came out as -inf.

The converter of the data set left out the clamp of negative counts (X_int[X_int < 0] = 0), so the stored features of one sample hold
-inf. The bottom MLP turns the row into inf and NaN, and the binary cross entropy and every gradient of the bottom MLP are NaN.

Source: https://github.com/facebookresearch/dlrm/blob/main/data_utils.py (processCriteoAdData) and dlrm_data_pytorch.py.
Heals: refusing or dropping the row, or the clamp (in the converter or on the batch). Does not heal: clamping the click probability.
"""

from types import SimpleNamespace

import torch
import torch.nn as nn

from expected import Expected

EXPECTED = Expected(
    phase=("input",),
    cause=("bad_input",),
    op=("any",),
    index=(3, 1),
    masked=None,
    role=("hidden",),
    fix=("reject_input", "drop_invalid_sample", "clamp_input", "fix_upstream"),
    variable=("dense_x",),
    line=("x = self.bot_l(dense_x)", "dense_x = torch.tensor(STORED_DENSE)", "logits = s.model(s.dense_x, s.sparse_x)"),
)

NEG_INF = float("-inf")
# six rows of the memory map of the converter, log(count + 1)
STORED_DENSE = [
    [0.6931, 1.0986, 0.0000, 2.1972],
    [0.0000, 4.6347, 1.7918, 0.6931],
    [2.3026, 0.0000, 0.6931, 5.1648],
    [1.3863, NEG_INF, 0.0000, 1.0986],
    [0.0000, 0.6931, 3.4012, 0.0000],
    [1.6094, 2.4849, 0.6931, 3.0445],
]


class DLRM(nn.Module):
    def __init__(self, dense=4, m_spa=8, tables=(30, 12)):
        super().__init__()
        self.bot_l = nn.Sequential(nn.Linear(dense, 16), nn.ReLU(), nn.Linear(16, m_spa), nn.ReLU())
        self.emb_l = nn.ModuleList(nn.Embedding(n, m_spa) for n in tables)
        pairs = (len(tables) + 1) * len(tables) // 2
        self.top_l = nn.Sequential(nn.Linear(m_spa + pairs, 16), nn.ReLU(), nn.Linear(16, 1))

    def interact_features(self, x, ly):
        T = torch.stack([x] + ly, dim=1)
        Z = torch.bmm(T, T.transpose(1, 2))
        li, lj = torch.tril_indices(T.size(1), T.size(1), offset=-1)
        return torch.cat([x, Z[:, li, lj]], dim=1)

    def forward(self, dense_x, sparse_x):
        x = self.bot_l(dense_x)
        ly = [emb(sparse_x[:, k]) for k, emb in enumerate(self.emb_l)]
        return self.top_l(self.interact_features(x, ly)).squeeze(1)


def build():
    torch.manual_seed(13)
    dense_x = torch.tensor(STORED_DENSE)
    sparse_x = torch.stack([torch.randint(0, 30, (6,)), torch.randint(0, 12, (6,))], dim=1)
    target = torch.tensor([0.0, 1.0, 0.0, 0.0, 1.0, 0.0])
    model = DLRM()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return SimpleNamespace(model=model, optimizer=optimizer, dense_x=dense_x, sparse_x=sparse_x, target=target)


def run(s=None):
    s = s or build()
    logits = s.model(s.dense_x, s.sparse_x)
    loss = nn.functional.binary_cross_entropy_with_logits(logits, s.target)
    s.optimizer.zero_grad()
    loss.backward()
    s.optimizer.step()
    return loss


if __name__ == "__main__":
    run()
