"""Plan2Explore on a world model: the intrinsic reward is the log of the disagreement (standard deviation) of an ensemble of prediction heads. The
debug configuration sets disag_models to 1; the standard deviation over one head is NaN, so are the imagined rewards, the lambda returns and
the actor's gradient.

Source: https://github.com/NM512/dreamerv3-torch/blob/main/exploration.py (Plan2Explore._intrinsic_reward). Heals: at least two heads, or no
intrinsic term for a single one. Tempting and useless: unbiased=False: the deviation is then 0 and its log -inf.
"""

from types import SimpleNamespace

import torch
import torch.nn as nn

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("std_single",),
    op=("std",),
    index=(0, 0, 0),
    masked=None,
    role=("rewards", "advantages", "hidden"),
    fix=("guard_small_group", "validate_config", "skip_disabled_term"),
    variable=(None,),
    line=("disag = torch.mean(torch.std(preds, 0), -1)[..., None]",),
)


class OneHotStraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits):
        probs = logits.softmax(-1)
        ctx.save_for_backward(probs)
        return nn.functional.one_hot(torch.multinomial(probs, 1).squeeze(-1), logits.shape[-1]).to(logits.dtype)

    @staticmethod
    def backward(ctx, grad):
        (probs,) = ctx.saved_tensors
        return probs * (grad - (grad * probs).sum(-1, keepdim=True))


class MSEDist:
    def __init__(self, mode):
        self._mode = mode

    def mode(self):
        return self._mode

    def log_prob(self, value):
        return -((self._mode - value) ** 2).mean(-1)


class Head(nn.Module):
    def __init__(self, inp, out):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(inp, 16), nn.SiLU(), nn.Linear(16, out))

    def forward(self, x):
        return MSEDist(self.layers(x))


class Plan2Explore(nn.Module):
    def __init__(self, config, feat=8, stoch=4, actions=3):
        super().__init__()
        self._config = config
        self.dynamics = nn.Linear(feat + actions, feat)
        self.actor = nn.Linear(feat, actions)
        self.value = nn.Linear(feat, 1)
        self._networks = nn.ModuleList(Head(feat, stoch) for _ in range(config.disag_models))
        for p in self.dynamics.parameters():
            p.requires_grad_(False)

    @torch.no_grad()
    def intrinsic_reward(self, feat):
        preds = torch.cat([head(feat).mode()[None] for head in self._networks], 0)
        disag = torch.mean(torch.std(preds, 0), -1)[..., None]
        if self._config.disag_log:
            disag = torch.log(disag)
        return self._config.expl_intr_scale * disag

    def imagine(self, feat):
        feats, actions = [], []
        for _ in range(self._config.imag_horizon):
            action = OneHotStraightThrough.apply(self.actor(feat))
            feats.append(feat)
            actions.append(action)
            feat = torch.tanh(self.dynamics(torch.cat([feat, action], -1)))
        return torch.stack(feats), torch.stack(actions)

    def lambda_return(self, reward, value):
        out, last = [], value[-1]
        for t in reversed(range(len(reward))):
            last = reward[t] + self._config.discount * (0.05 * value[t] + 0.95 * last)
            out.append(last)
        return torch.stack(out[::-1])

    def loss(self, start, stoch):
        feats, _ = self.imagine(start)
        target = self.lambda_return(self.intrinsic_reward(feats), self.value(feats))
        actor_loss = -target.mean()
        value_loss = (self.value(feats.detach()) - target.detach()).pow(2).mean()
        likes = torch.stack([head(start).log_prob(stoch).mean() for head in self._networks])
        return actor_loss + value_loss - likes.mean()


def build():
    torch.manual_seed(12)
    config = SimpleNamespace(disag_models=1, disag_log=True, expl_intr_scale=1.0, imag_horizon=5, discount=0.99)
    model = Plan2Explore(config)
    return SimpleNamespace(
        model=model, start=torch.randn(6, 8), stoch=torch.randn(6, 4), optimizer=torch.optim.Adam(model.parameters(), lr=3e-5, eps=1e-5)
    )


def run(s=None):
    s = s or build()
    loss = s.model.loss(s.start, s.stoch)
    s.optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(s.model.parameters(), 100.0)
    s.optimizer.step()
    return loss
