"""IDGL, graph structure learning: an epsilon neighbourhood of weighted cosine similarities, normalised by degree ** -0.5.

Citeseer has nodes without a single word. Their embedding is 0, so is their similarity to every node, themselves included: nothing is above epsilon, the
row of the learned graph is empty and its degree 0. pow(0, -0.5) = inf is overwritten by 0, so the forward is finite. The backward of that assignment
hands 0 to pow, which multiplies it by -0.5 * 0 ** -1.5 = -inf: NaN. It passes the product with the neighbourhood mask and fills the metric's weights.

Source: compute_normalized_laplacian and build_epsilon_neighbourhood of https://github.com/hugochan/IDGL (src/core/layers/graphlearn.py)
Heals: a floor under the degree before pow, a degree of 1 for empty rows before pow, a self-loop for every node. Does not: nan_to_num or where() on the
finished d_inv_sqrt (that is what the assignment does already), clipping the gradients.
"""

from types import SimpleNamespace

import torch
from torch import nn
from torch.nn import functional as F

from expected import Expected

EXPECTED = Expected(
    phase=("backward",),
    cause=("where_grad_trap", "zero_denominator"),
    op=("pow",),
    index=(6,),
    masked=True,
    role=("hidden",),
    fix=("mask_before_op", "clamp_input", "avoid_singular_op", "clamp_denominator", "guard_empty", "where_on_detached"),
    variable=("d_inv_sqrt",),
    line=("d_inv_sqrt = torch.pow(rowsum, -0.5)",),
)


def build_epsilon_neighbourhood(attention, epsilon):
    mask = (attention > epsilon).detach().float()
    return attention * mask


def compute_normalized_laplacian(adj):
    rowsum = torch.sum(adj, -1)
    d_inv_sqrt = torch.pow(rowsum, -0.5)
    d_inv_sqrt[torch.isinf(d_inv_sqrt)] = 0.0
    d_mat_inv_sqrt = torch.diagflat(d_inv_sqrt)
    return torch.mm(torch.mm(d_mat_inv_sqrt, adj), d_mat_inv_sqrt)


class GraphLearner(nn.Module):
    """weighted_cosine: a learned weight per feature and perspective, cosine similarity, mean over the perspectives."""

    def __init__(self, n_features, num_pers=4, epsilon=0.3):
        super().__init__()
        self.epsilon = epsilon
        self.weight_tensor = nn.Parameter(1.0 + 0.1 * torch.randn(num_pers, n_features))

    def forward(self, context):
        context_fc = context.unsqueeze(0) * self.weight_tensor.unsqueeze(1)
        context_norm = F.normalize(context_fc, p=2, dim=-1)
        attention = torch.matmul(context_norm, context_norm.transpose(-1, -2)).mean(0)
        return build_epsilon_neighbourhood(attention, self.epsilon)


class IDGL(nn.Module):
    def __init__(self, n_features, hidden=16, classes=3):
        super().__init__()
        self.graph_learner = GraphLearner(n_features)
        self.conv1 = nn.Linear(n_features, hidden)
        self.conv2 = nn.Linear(hidden, classes)

    def forward(self, features):
        adj = compute_normalized_laplacian(self.graph_learner(features))
        x = F.relu(adj @ self.conv1(features))
        return adj @ self.conv2(x)


def build():
    torch.manual_seed(15)
    n, d = 14, 20
    features = (torch.rand(n, d) < 0.25).float()
    features[6] = 0.0  # an article without any word of the dictionary
    model = IDGL(d)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    return SimpleNamespace(model=model, optimizer=optimizer, batch={"features": features, "labels": torch.randint(0, 3, (n,))})


def run(s=None):
    s = s or build()
    losses = []
    for _ in range(2):
        loss = F.cross_entropy(s.model(s.batch["features"]), s.batch["labels"])
        s.optimizer.zero_grad()
        loss.backward()
        s.optimizer.step()
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    print(run())
