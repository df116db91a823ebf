"""pytorch #49724 - logaddexp(-inf, -inf) is -inf in the forward, which is right, and has a NaN gradient.

Forward algorithm of a left-to-right HMM that aligns frames with phones (neural HMM text-to-speech): only state 0 may start. At frame 1
state 2 is still impossible, both ways into it are -inf, and the loss is finite; the backward computes -inf - (-inf) there.
Source: https://github.com/pytorch/pytorch/issues/49724
Heals: a large finite number in place of -inf, a masked logaddexp. Does not: masking the alphas after logaddexp, clipping gradients.
"""

from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F

from expected import Expected

EXPECTED = Expected(
    phase=("backward", "forward"),
    cause=("inf_minus_inf", "where_grad_trap", "fully_masked_softmax"),
    op=("logaddexp",),
    index=(0, 2),
    masked=None,
    role=("log_probs", "hidden"),
    fix=("finite_mask_fill", "mask_before_op", "stable_function", "avoid_singular_op", "clamp_input", "safe_softmax"),
    variable=("arrive",),
    line=("arrive = torch.logaddexp(alpha + stay, previous + move)",),
)


class NeuralHMM(nn.Module):
    def __init__(self, phones=20, dim=12, frame_dim=5):
        super().__init__()
        self.encoder = nn.Embedding(phones, dim)
        self.mean = nn.Linear(dim, frame_dim)
        self.transition = nn.Linear(dim, 1)

    def forward(self, phones):
        h = torch.tanh(self.encoder(phones))
        return self.mean(h), self.transition(h).squeeze(-1)


def shift(x, fill):
    return F.pad(x[:, :-1], (1, 0), value=fill)


def forward_algorithm(emission, transition, fill=float("-inf")):
    """emission: batch x frames x states, log densities. Returns the log-likelihood of each utterance."""
    move_logp, stay = F.logsigmoid(transition), F.logsigmoid(-transition)
    batch, frames, states = emission.shape
    start = torch.full((batch, states), fill, dtype=emission.dtype)
    start[:, 0] = 0.0
    alpha = start + emission[:, 0]
    move = shift(move_logp, 0.0)
    for t in range(1, frames):
        previous = shift(alpha, fill)
        arrive = torch.logaddexp(alpha + stay, previous + move)
        alpha = arrive + emission[:, t]
    return alpha[:, -1] + move_logp[:, -1]


def build():
    torch.manual_seed(7)
    model = NeuralHMM().double()
    phones = torch.randint(0, 20, (2, 3))
    frames = torch.randn(2, 9, 5, dtype=torch.float64)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    return SimpleNamespace(model=model, phones=phones, frames=frames, optimizer=optimizer)


def run(s=None):
    s = s or build()
    mean, transition = s.model(s.phones)
    emission = -0.5 * (s.frames.unsqueeze(2) - mean.unsqueeze(1)).square().sum(-1)
    log_likelihood = forward_algorithm(emission, transition)
    loss = -log_likelihood.mean() / s.frames.shape[1]
    s.optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(s.model.parameters(), 1.0)
    s.optimizer.step()
    return loss
