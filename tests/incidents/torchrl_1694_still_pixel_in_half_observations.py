"""torchrl #1694 - Dreamer with ObservationNorm: the statistics come from a short random rollout, and some pixels never change in it.

Their scale is the eps, 1e-6, and the normalised pixel is huge once anything moves there. The replay buffer holds observations in float16 to save memory
and the transform runs in that dtype: 0.28 / 1e-6 is beyond 65504, inf. The convolution spreads it, silu makes -inf * 0 = NaN of it, and model loss and gradients are NaN.

Source: https://github.com/pytorch/rl/issues/1694 (in float32: "Encoder outputs None, huge actor and model losses")
Heals: a floor of the scale that is worth a pixel (0.05), clamping the normalised observation to +-10. Does not: the transform in float32 (finite, but the
reconstruction target is 2.8e5 and the loss 7e7 - the issue as reported), loss scaling, a smaller learning rate, + eps in the layer norm.
"""

from types import SimpleNamespace

import torch
from torch import nn

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("fp16_overflow",),
    op=("div",),
    index=(2, 1, 0, 4, 9),
    masked=None,
    role=("hidden",),
    fix=("clamp_denominator", "clamp_input", "avoid_singular_op", "fix_upstream"),
    variable=("obs",),
    line=("obs = (pixels - self.loc) / self.scale",),
)


class ObservationNorm(nn.Module):
    """standard_normal=True: (obs - loc) / scale, both from init_stats."""

    def __init__(self, eps: float = 1e-6):
        super().__init__()
        self.eps = eps
        self.register_buffer("loc", torch.zeros(()))
        self.register_buffer("scale", torch.ones(()))

    @torch.no_grad()
    def init_stats(self, frames):
        self.loc = frames.float().mean(0).to(frames.dtype)
        self.scale = (frames.float().std(0) + self.eps).to(frames.dtype)

    def forward(self, pixels):
        obs = (pixels - self.loc) / self.scale
        return obs


class WorldModel(nn.Module):
    def __init__(self, size=12, dim=32):
        super().__init__()
        self.encoder = nn.Sequential(nn.Conv2d(1, 8, 4, stride=2), nn.SiLU(), nn.Flatten(), nn.Linear(8 * 25, dim), nn.LayerNorm(dim))
        self.rnn = nn.GRUCell(dim + 2, dim)
        self.decoder = nn.Sequential(nn.Linear(dim, 64), nn.SiLU(), nn.Linear(64, size * size))

    def forward(self, obs, actions):
        batch, steps = obs.shape[:2]
        embed = self.encoder(obs.flatten(0, 1)).unflatten(0, (batch, steps))
        h = torch.zeros(batch, embed.size(-1))
        beliefs = []
        for t in range(steps):
            h = self.rnn(torch.cat([embed[:, t], actions[:, t]], dim=-1), h)
            beliefs.append(h)
        return self.decoder(torch.stack(beliefs, dim=1))


def build():
    torch.manual_seed(1694)
    init_frames = torch.rand(40, 1, 12, 12) * 0.6 + 0.2
    init_frames[:, :, 4, 9] = 0.25  # the score board: nothing scored in the random rollout
    transform = ObservationNorm()
    transform.init_stats(init_frames.half())
    model = WorldModel()
    optimizer = torch.optim.Adam(model.parameters(), lr=6e-4)
    pixels = torch.rand(3, 5, 1, 12, 12) * 0.6 + 0.2
    pixels[..., 4, 9] = 0.25
    pixels[2, 1:, :, 4, 9] = 0.53
    return SimpleNamespace(
        model=model, optimizer=optimizer, transform=transform, batch={"pixels": pixels.half(), "actions": torch.randn(3, 5, 2)}
    )


def run(s=None):
    s = s or build()
    losses = []
    for _ in range(2):
        obs = s.transform(s.batch["pixels"]).float()
        reconstruction = s.model(obs, s.batch["actions"])
        loss = 0.5 * (reconstruction - obs.flatten(2)).square().mean()
        s.optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(s.model.parameters(), 100.0)
        s.optimizer.step()
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    print(run())
