"""Focal loss of an edge classifier for particle tracks, written with plain logarithms: a true edge of which the network is quite sure.

sigmoid of a logit of 20 is exactly 1 in float32, so the probability of "no edge" is 0 and its log is -inf. The negative term is meant to vanish for a true edge,
but it does so by (1 - target) = 0 as a factor: 0 * -inf = NaN, and the mean over all edges is NaN.
Source: https://github.com/gnn-tracking/gnn_tracking/issues/104 (binary focal loss with probs.log(); "could be zeros in inpt?")
Heals: logsigmoid of the logits, a clamp of the probabilities before the log, taking the log of each class on its own edges only.
Does not: torch.where(target, 0, term) around the finished negative term (forward heals, backward is 0 * inf), clipping the gradients.
"""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import nn

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("inf_times_zero_mask", "log_zero", "inf_times_zero_coef"),
    op=("log",),
    index=(4,),
    masked=None,
    role=("log_probs", "loss", "hidden"),
    fix=("stable_function", "clamp_input", "mask_before_op", "representable_eps", "where_on_detached"),
    variable=(None,),
    line=("neg_term = -(1 - alpha) * probs_pos.pow(gamma) * (1.0 - target) * probs_neg.log()",),
)


class EdgeClassifier(nn.Module):
    def __init__(self, node_dim=6, hidden=16):
        super().__init__()
        self.node_encoder = nn.Sequential(nn.Linear(node_dim, hidden), nn.ReLU())
        self.edge_net = nn.Linear(2 * hidden, 1)

    def forward(self, x, edge_index):
        h = self.node_encoder(x)
        messages = torch.zeros_like(h).index_add(0, edge_index[1], h[edge_index[0]])
        h = h + messages
        return torch.sigmoid(self.edge_net(torch.cat((h[edge_index[0]], h[edge_index[1]]), dim=-1)).squeeze(-1))


def binary_focal_loss(inpt, target, alpha=0.25, gamma=2.0, pos_weight=1.0):
    probs_pos = inpt
    probs_neg = 1 - inpt
    pos_term = -alpha * pos_weight * probs_neg.pow(gamma) * target * probs_pos.log()
    neg_term = -(1 - alpha) * probs_pos.pow(gamma) * (1.0 - target) * probs_neg.log()
    return (pos_term + neg_term).mean()


def build():
    torch.manual_seed(1)
    model = EdgeClassifier()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    x = torch.randn(6, 6)
    x[5] *= 60.0  # a hit in a feature that was not scaled
    edge_index = torch.tensor([[0, 1, 2, 3, 4, 0, 1], [1, 2, 3, 4, 5, 2, 3]])
    target = torch.tensor([1.0, 1.0, 0.0, 1.0, 1.0, 0.0, 0.0])
    with torch.no_grad():
        model.edge_net.weight[0, 16:].abs_()
    return SimpleNamespace(model=model, optimizer=optimizer, batch={"x": x, "edge_index": edge_index, "y": target})


def run(s=None):
    s = s or build()
    losses = []
    for _ in range(2):
        w = s.model(s.batch["x"], s.batch["edge_index"])
        loss = binary_focal_loss(w, s.batch["y"])
        s.optimizer.zero_grad()
        loss.backward()
        s.optimizer.step()
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    print(run())
