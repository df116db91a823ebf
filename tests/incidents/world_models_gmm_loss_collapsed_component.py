"""ctallec/world-models gmm_loss (the mixture density head of the MDN-RNN): one latent never changes (a part of the VAE's code that
is switched off) and one component has learned it so well that its sigma is exp(-60). Normal.log_prob squares it: the variance is
0 and the log-density -inf. logsumexp drops the component, the loss is finite; backward multiplies its weight 0 by 1/0.

    https://github.com/ctallec/world-models/blob/master/models/mdrnn.py
    (the loss running away downwards with few latents: https://github.com/ctallec/world-models/issues/18)

Heals: a floor for log sigma or for sigma.
Does not heal: a floor for the log-density after it was computed, nan_to_num on it.
"""

from types import SimpleNamespace

import torch
import torch.nn as nn
from torch.distributions import Normal

from expected import Expected

EXPECTED = Expected(
    phase=("backward",),
    cause=("zero_denominator", "where_grad_trap", "zero_div_zero"),
    op=("div", "log_prob"),
    index=(0, 0, 1, 2),
    masked=None,
    role=("log_probs", "hidden"),
    fix=("clamp_exponent", "clamp_input", "clamp_denominator", "representable_eps"),
    variable=("g_log_probs", None),
    line=("g_log_probs = normal.log_prob(batch.unsqueeze(-2))",),
)

GAUSSIANS = 3
LATENTS = 4


class MDRNN(nn.Module):
    def __init__(self, latents, actions, hiddens, gaussians):
        super().__init__()
        self.latents, self.gaussians = latents, gaussians
        self.rnn = nn.LSTM(latents + actions, hiddens)
        self.gmm_linear = nn.Linear(hiddens, (2 * latents + 1) * gaussians + 2)

    def forward(self, actions, latents):
        seq_len, bs = actions.size(0), actions.size(1)
        outs, _ = self.rnn(torch.cat([actions, latents], dim=-1))
        out = self.gmm_linear(outs)
        stride = self.gaussians * self.latents
        mus = out[..., :stride].view(seq_len, bs, self.gaussians, self.latents)
        log_sigmas = out[..., stride : 2 * stride].view(seq_len, bs, self.gaussians, self.latents)
        pi = out[..., 2 * stride : 2 * stride + self.gaussians]
        logpi = torch.log_softmax(pi, dim=-1)
        return mus, torch.exp(log_sigmas), logpi, out[..., -2], out[..., -1]


def gmm_loss(batch, mus, sigmas, logpi):
    """Negative log-likelihood of the next latents under the mixture."""
    normal = Normal(mus, sigmas, validate_args=False)
    g_log_probs = normal.log_prob(batch.unsqueeze(-2))
    log_probs = torch.logsumexp(logpi + g_log_probs.sum(dim=-1), dim=-1)
    return -log_probs.mean()


def build():
    torch.manual_seed(18)
    model = MDRNN(LATENTS, 2, 16, GAUSSIANS)
    with torch.no_grad():  # what training has made of component 1 in latent 2
        bias = model.gmm_linear.bias[GAUSSIANS * LATENTS : 2 * GAUSSIANS * LATENTS].view(GAUSSIANS, LATENTS)
        bias[1, 2] = -60.0
    latents = torch.randn(5, 3, LATENTS)
    latents[..., 2] = 0.125
    next_latents = torch.randn(5, 3, LATENTS)
    next_latents[..., 2] = 0.125
    return SimpleNamespace(
        model=model,
        actions=torch.rand(5, 3, 2),
        latents=latents,
        next_latents=next_latents,
        rewards=torch.randn(5, 3),
        terminals=torch.zeros(5, 3),
        optimizer=torch.optim.RMSprop(model.parameters(), lr=1e-3, alpha=0.9),
    )


def run(s=None):
    s = s or build()
    mus, sigmas, logpi, rs, ds = s.model(s.actions, s.latents)
    gmm = gmm_loss(s.next_latents, mus, sigmas, logpi)
    bce = nn.functional.binary_cross_entropy_with_logits(ds, s.terminals)
    mse = nn.functional.mse_loss(rs, s.rewards)
    loss = (gmm + bce + mse) / (LATENTS + 2)
    s.optimizer.zero_grad()
    loss.backward()
    s.optimizer.step()
    return loss


if __name__ == "__main__":
    run()
