"""PPO with GAE computed backwards in time, terminal states in the middle, dual clipping for negative advantages."""

from types import SimpleNamespace

import torch
from torch import nn

HEALTHY = "a value loss with both branches active, dual-clip, and an in-place advantage buffer that begins uninitialised"


def gae(rewards, values, dones, gamma=0.99, lam=0.95):
    adv = torch.empty_like(rewards)
    carry = torch.zeros_like(rewards[0])
    for t in range(rewards.shape[0] - 1, -1, -1):
        alive = (~dones[t]).float()
        delta = rewards[t] + gamma * values[t + 1] * alive - values[t]
        carry = delta + gamma * lam * alive * carry
        adv[t] = carry
    return adv


def build():
    torch.manual_seed(313)
    net = nn.ModuleDict({"pi": nn.Linear(4, 3), "v": nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1))})
    obs = torch.randn(9, 2, 4)
    dones = torch.zeros(8, 2, dtype=torch.bool)
    dones[3, 0] = dones[7, 1] = True
    data = {"obs": obs, "dones": dones, "act": torch.randint(0, 3, (8, 2)), "rew": torch.randn(8, 2)}
    return SimpleNamespace(net=net, data=data, opt=torch.optim.Adam(net.parameters(), lr=3e-3))


def run(s=None):
    s = s or build()
    d = s.data
    with torch.no_grad():
        old_v = s.net["v"](d["obs"]).squeeze(-1)
        old_lp = s.net["pi"](d["obs"][:-1]).log_softmax(-1).gather(-1, d["act"][..., None]).squeeze(-1)
        adv = gae(d["rew"], old_v, d["dones"])
        ret = adv + old_v[:-1]
        adv = (adv - adv.mean()) / adv.std().clamp_min(1e-6)
    for _ in range(5):
        lp = s.net["pi"](d["obs"][:-1]).log_softmax(-1).gather(-1, d["act"][..., None]).squeeze(-1)
        v = s.net["v"](d["obs"][:-1]).squeeze(-1)
        r = (lp - old_lp).exp()
        clipped = torch.min(r * adv, r.clamp(0.8, 1.2) * adv)
        pg = -torch.where(adv < 0, torch.max(clipped, 3.0 * adv), clipped).mean()
        v_clip = old_v[:-1] + (v - old_v[:-1]).clamp(-0.02, 0.02)
        vf = torch.max((v - ret) ** 2, (v_clip - ret) ** 2).mean()
        loss = pg + 0.5 * vf
        s.opt.zero_grad()
        loss.backward()
        s.opt.step()
    return loss
