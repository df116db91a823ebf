"""ManiSkill RGB-D diffusion policy - depth images are kept as float16 to save memory, and the sensor's "no return" is 65535.

Depth comes as unsigned 16 bit millimetres. Pixels without a return (sky, glass, too near) hold 65535, which is beyond the largest half, 65504: the
cast makes them inf. The encoder turns back to float32 and divides by 1024 afterwards, inf stays inf, the convolutions give inf - inf, and the noise
prediction and every weight are NaN.
Source: functions SmallDemoDataset_DiffusionPolicy and encode_obs of
https://github.com/haosulab/ManiSkill/blob/main/examples/baselines/diffusion_policy/train_rgbd.py (depth to float16, .float() / 1024)

Heals: keep depth in float32 (or divide before the cast), clamp it to the sensor's range before the cast, leave out frames with such pixels.
Does not: .float() after the cast (it is there), or clipping gradients.
"""

from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F

from expected import Expected

EXPECTED = Expected(
    phase=("forward", "input"),
    cause=("fp16_overflow", "bad_input"),
    op=("to", "_to_copy", "half", "copy_"),
    index=(1, 0, 2, 3),
    masked=None,
    role=("hidden",),
    fix=("upcast_fp32", "clamp_input", "drop_invalid_sample", "reject_input"),
    variable=("depth", None, 'obs_seq["depth"]'),
    line=("depth = batch.depth.float().to(dtype=torch.float16)",),
)


class PlainConv(nn.Module):
    def __init__(self, in_channels=4, out_dim=16):
        super().__init__()
        self.cnn = nn.Sequential(
            nn.Conv2d(in_channels, 8, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(8, 8, 3, padding=1),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(1),
        )
        self.fc = nn.Linear(8, out_dim)

    def forward(self, image):
        return self.fc(self.cnn(image).flatten(1))


class Agent(nn.Module):
    def __init__(self, act_dim=4, pred_horizon=6, state_dim=5, iters=50):
        super().__init__()
        self.visual_encoder = PlainConv()
        cond = 16 + state_dim + 1
        self.noise_pred_net = nn.Sequential(nn.Linear(act_dim * pred_horizon + cond, 48), nn.Mish(), nn.Linear(48, act_dim * pred_horizon))
        betas = torch.linspace(1e-4, 0.02, iters)
        self.register_buffer("alphas_cumprod", torch.cumprod(1.0 - betas, 0))

    def encode_obs(self, obs):
        rgb = obs["rgb"].float() / 255.0
        depth = obs["depth"].float() / 1024.0
        visual_feature = self.visual_encoder(torch.cat([rgb, depth], dim=1))
        return torch.cat([visual_feature, obs["state"]], dim=-1)

    def compute_loss(self, obs, actions):
        obs_cond = self.encode_obs(obs)
        noise = torch.randn_like(actions)
        timesteps = torch.randint(0, len(self.alphas_cumprod), (len(actions),))
        a = self.alphas_cumprod[timesteps].view(-1, 1, 1)
        noisy_actions = a.sqrt() * actions + (1.0 - a).sqrt() * noise
        t = timesteps.float().unsqueeze(-1) / len(self.alphas_cumprod)
        noise_pred = self.noise_pred_net(torch.cat([noisy_actions.flatten(1), obs_cond, t], dim=-1))
        return F.mse_loss(noise_pred, noise.flatten(1))


def process_obs(batch):
    depth = batch.depth.float().to(dtype=torch.float16)
    return {"rgb": batch.rgb, "depth": depth, "state": batch.state}


def build():
    torch.manual_seed(65)
    model = Agent()
    n = 4
    depth = torch.randint(300, 2400, (n, 1, 8, 8), dtype=torch.int32)
    depth[1, 0, 2:4, 3:6] = 65535  # a glass door
    batch = SimpleNamespace(
        depth=depth,
        rgb=torch.randint(0, 256, (n, 3, 8, 8), dtype=torch.uint8),
        state=torch.randn(n, 5),
        actions=torch.rand(n, 6, 4) * 2 - 1,
    )
    return SimpleNamespace(model=model, batch=batch, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=1e-6))


def run(s=None):
    s = s or build()
    loss = s.model.compute_loss(process_obs(s.batch), s.batch.actions)
    s.optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(s.model.parameters(), 1.0)
    s.optimizer.step()
    return loss


if __name__ == "__main__":
    run()
