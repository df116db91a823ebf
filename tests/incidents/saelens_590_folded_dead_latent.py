"""SAELens #588 / PR #590 - folding the decoder norms of a sparse autoencoder with a dead latent writes NaN into W_dec.

The pretrained autoencoder was folded (W_dec / norm, W_enc * norm) before it was published; latent 3 had a decoder row of zeros, so its row is
0 / 0. Fine-tuning starts from these weights. The latent never fires, but 0 * NaN in the decoder's matmul makes every reconstruction NaN.
Source: https://github.com/decoderesearch/SAELens/pull/590
Heals: fold with a floor on the norm, repair or refuse the checkpoint. Does not: zeroing the dead latent's activation, skipping updates.
"""

from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F

from expected import Expected

EXPECTED = Expected(
    phase=("weights", "forward"),
    cause=("poisoned_weights", "zero_div_zero"),
    op=("any", "div", "matmul", "mm"),
    index=None,
    masked=None,
    role=("weights", "hidden"),
    fix=("fix_upstream", "clamp_denominator", "reject_input", "initialise_memory", "representable_eps"),
    variable=("W_dec",),
    line=("return feature_acts @ self.W_dec + self.b_dec", 'W_dec = state["W_dec"] / W_dec_norms.unsqueeze(-1)', None),
)


class SAE(nn.Module):
    def __init__(self, d_in=8, d_sae=16):
        super().__init__()
        self.W_enc = nn.Parameter(torch.empty(d_in, d_sae))
        self.b_enc = nn.Parameter(torch.zeros(d_sae))
        self.W_dec = nn.Parameter(torch.empty(d_sae, d_in))
        self.b_dec = nn.Parameter(torch.zeros(d_in))
        nn.init.kaiming_uniform_(self.W_enc)
        nn.init.kaiming_uniform_(self.W_dec)

    def encode(self, x):
        return F.relu((x - self.b_dec) @ self.W_enc + self.b_enc)

    def decode(self, feature_acts):
        return feature_acts @ self.W_dec + self.b_dec

    def forward(self, x):
        feature_acts = self.encode(x)
        return self.decode(feature_acts), feature_acts


def fold_W_dec_norm(state):
    """Unit decoder rows; the norms go into the encoder."""
    W_dec_norms = state["W_dec"].norm(dim=-1)
    W_dec = state["W_dec"] / W_dec_norms.unsqueeze(-1)
    return {
        "W_enc": state["W_enc"] * W_dec_norms,
        "b_enc": state["b_enc"] * W_dec_norms,
        "W_dec": W_dec,
        "b_dec": state["b_dec"],
    }


def published_state(d_in=8, d_sae=16):
    sae = SAE(d_in, d_sae)
    with torch.no_grad():
        sae.W_dec[3] = 0.0  # a dead latent, decayed to nothing
    return fold_W_dec_norm({k: v.clone() for k, v in sae.state_dict().items()})


def build():
    torch.manual_seed(8)
    sae = SAE()
    sae.load_state_dict(published_state())
    activations = torch.randn(32, 8)
    optimizer = torch.optim.Adam(sae.parameters(), lr=1e-4, betas=(0.0, 0.999))
    return SimpleNamespace(model=sae, activations=activations, optimizer=optimizer, l1_coefficient=1e-3)


def run(s=None):
    s = s or build()
    sae_out, feature_acts = s.model(s.activations)
    mse_loss = (sae_out - s.activations).pow(2).sum(-1).mean()
    l1_loss = feature_acts.sum(-1).mean()
    loss = mse_loss + s.l1_coefficient * l1_loss
    s.optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(s.model.parameters(), 1.0)
    s.optimizer.step()
    return loss
