"""Value-implicit pre-training of a robot's visual encoder: the dual objective is log(eps + mean(exp(-(r + gamma V(s') - V(s))))) with V the
negative distance to the goal embedding. One clip straddles a cut of the video: its next frame is far from the goal while the frame before
it is close, the exponent is above 88 and exp overflows; the loss is inf and its gradient inf / inf.

Source: Trainer.update in https://github.com/facebookresearch/vip/blob/main/vip/trainer.py
Heals: logsumexp instead of log(mean(exp)), or a bound on the exponent. Clamping the result of exp gives a finite loss and a NaN gradient.
"""

from types import SimpleNamespace

import torch
import torch.nn as nn

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("exp_overflow",),
    op=("exp",),
    index=(6,),
    masked=False,
    role=("loss", "hidden", "advantages", "is_weight", "rewards", "ratio"),
    fix=("stable_function", "clamp_exponent", "clamp_input", "drop_invalid_sample", "fix_upstream"),
    variable=(None,),
    line=("weight = torch.mean(torch.exp(-(r + model.gamma * V_s_next - V_s)))",),
)

epsilon = 1e-8


class VIP(nn.Module):
    def __init__(self, hidden_dim=16, gamma=0.98, num_negatives=0, l2weight=1e-5, l1weight=1e-5):
        super().__init__()
        self.gamma, self.num_negatives, self.l2weight, self.l1weight = gamma, num_negatives, l2weight, l1weight
        self.convnet = nn.Sequential(nn.Conv2d(3, 8, 3, stride=2), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 9, hidden_dim))
        self.register_buffer("scale", torch.tensor(300.0))

    def forward(self, frames):
        return self.scale * self.convnet(frames / 255.0)

    def sim(self, tensor1, tensor2):
        return -torch.linalg.norm(tensor1 - tensor2, dim=-1)


class Trainer:
    def __init__(self, optimizer):
        self.optimizer = optimizer
        self.metrics = {}

    def update(self, model, batch):
        b_im, b_reward = batch
        bs, stack = b_im.shape[:2]
        alles = model(b_im.reshape(bs * stack, *b_im.shape[2:]))
        alle = alles.reshape(bs, stack, -1)
        e0, eg, es0_vip, es1_vip = alle[:, 0], alle[:, 1], alle[:, 2], alle[:, 3]

        l2loss = torch.linalg.norm(alles, ord=2, dim=-1).mean()
        l1loss = torch.linalg.norm(alles, ord=1, dim=-1).mean()
        full_loss = model.l2weight * l2loss + model.l1weight * l1loss

        V_0 = model.sim(e0, eg)
        r = b_reward
        V_s = model.sim(es0_vip, eg)
        V_s_next = model.sim(es1_vip, eg)
        weight = torch.mean(torch.exp(-(r + model.gamma * V_s_next - V_s)))
        V_loss = (1 - model.gamma) * -V_0.mean() + torch.log(epsilon + weight)
        full_loss = full_loss + V_loss
        self.metrics = {"l2loss": l2loss.item(), "vip_loss": V_loss.item(), "full_loss": full_loss.item()}

        self.optimizer.zero_grad()
        full_loss.backward()
        self.optimizer.step()
        return full_loss


def build():
    torch.manual_seed(2210)
    model = VIP()
    clip = torch.randint(60, 90, (8, 1, 3, 8, 8)).float()
    frames = (clip + torch.randint(-4, 5, (8, 4, 3, 8, 8))).clamp(0, 255)
    pattern = (torch.rand(3, 8, 8) > 0.5).float() * 255.0
    frames[6, 3] = pattern  # the cut
    rewards = -torch.ones(8)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    return SimpleNamespace(model=model, batch=(frames, rewards), trainer=Trainer(optimizer), optimizer=optimizer)


def run(s=None):
    s = s or build()
    return s.trainer.update(s.model, s.batch)
