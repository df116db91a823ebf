"""kornia #3481 - SigLIP's learned temperature holds 100.0, the model takes exp(100.0).

The two towers are fine-tuned from a converted checkpoint. The converter stored the temperature as the factor itself (100.0), the model
expects its logarithm, so `logit_scale.exp()` is inf in float32 and every image-text logit is +-inf; the sigmoid loss is inf and the gradient of
both towers is not finite.

Source: https://github.com/kornia/kornia/issues/3481 and its fix https://github.com/kornia/kornia/pull/3480 (clamp before exp);
https://github.com/openai/CLIP/pull/530 (clamp after exp).

Heals: clamp the parameter before the exponential, or store log(100) in the checkpoint. Does not heal: `logit_scale.exp().clamp(max=100)` (the
loss is finite then, but the backward of exp makes 0 * inf and the temperature becomes NaN), gradient clipping.
"""

import math
from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("exp_overflow",),
    op=("exp",),
    index=(),
    masked=None,
    role=("logits", "weights"),
    fix=("clamp_exponent", "fix_upstream", "validate_config"),
    variable=("scale",),
    line=("scale = self.logit_scale.exp()",),
)


class Tower(nn.Module):
    def __init__(self, width_in, width=8):
        super().__init__()
        self.fc1 = nn.Linear(width_in, 16)
        self.fc2 = nn.Linear(16, width)

    def forward(self, x):
        return F.normalize(self.fc2(F.gelu(self.fc1(x))), dim=-1)


class SigLip(nn.Module):
    def __init__(self):
        super().__init__()
        self.vision = Tower(12)
        self.text = Tower(10)
        self.logit_scale = nn.Parameter(torch.tensor(math.log(10.0)))
        self.logit_bias = nn.Parameter(torch.tensor(-10.0))

    def forward(self, pixels, tokens):
        image, text = self.vision(pixels), self.text(tokens)
        scale = self.logit_scale.exp()
        return text @ image.t() * scale + self.logit_bias


def siglip_loss(logits):
    n = logits.shape[0]
    labels = 2.0 * torch.eye(n) - 1.0
    return -F.logsigmoid(labels * logits).sum(dim=-1).mean()


def convert(checkpoint):
    """Jax layout to torch: the key of the temperature is renamed, the rest has the same names."""
    state = {key: value for key, value in checkpoint.items() if key != "t"}
    state["logit_scale"] = checkpoint["t"]
    return state


def build():
    torch.manual_seed(2102)
    trained = SigLip().state_dict()
    trained.pop("logit_scale")
    model = SigLip()
    model.load_state_dict(convert({**trained, "t": torch.tensor(100.0)}))
    return SimpleNamespace(
        model=model,
        pixels=torch.randn(6, 12),
        tokens=torch.randn(6, 10),
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.0),
    )


def run(s=None):
    s = s or build()
    s.optimizer.zero_grad(set_to_none=True)
    loss = siglip_loss(s.model(s.pixels, s.tokens))
    loss.backward()
    torch.nn.utils.clip_grad_norm_(s.model.parameters(), 1.0)
    s.optimizer.step()
    return loss


if __name__ == "__main__":
    print(run())
