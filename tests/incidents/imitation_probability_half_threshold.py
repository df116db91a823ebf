"""A reward net learns from preferences over trajectory fragments: P(first preferred) = 1 / (1 + exp(return difference)), with a clip at 50 "to
avoid overflows, in particular in the backward pass". The net runs in half precision, where exp overflows beyond 11: the probability is a
clean 0 (and the noise term makes the loss finite), but the derivative is 0 * inf and all gradients are NaN.

Source: https://github.com/HumanCompatibleAI/imitation/blob/master/src/imitation/algorithms/preference_comparisons.py
(PreferenceModel.probability). Heals: float32 for the difference, a threshold of 10, or torch.sigmoid(-diff). Tempting and useless: a
larger noise_prob, or clamping the probability away from 0 before the cross entropy.
"""

from types import SimpleNamespace

import torch
import torch.nn as nn

from expected import Expected

EXPECTED = Expected(
    phase=("backward", "forward"),
    cause=("fp16_overflow", "exp_overflow", "seq_ratio_overflow"),
    op=("exp",),
    index=(),
    masked=None,
    role=("ratio", "rewards", "logits", "hidden", "loss"),
    fix=("upcast_fp32", "stable_function", "clamp_exponent", "clamp_input", "validate_config"),
    variable=(None,),
    line=("model_probability = 1 / (1 + returns_diff.exp())",),
)


class BasicRewardNet(nn.Module):
    def __init__(self, obs_dim=4, act_dim=2, hid=16):
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(obs_dim + act_dim, hid), nn.ReLU(), nn.Linear(hid, 1))

    def forward(self, state, action):
        return self.mlp(torch.cat([state, action], dim=1)).squeeze(1)


class PreferenceModel(nn.Module):
    def __init__(self, model, noise_prob=0.1, discount_factor=1.0, threshold=50.0):
        super().__init__()
        self.model = model
        self.noise_prob = noise_prob
        self.discount_factor = discount_factor
        self.threshold = threshold

    def forward(self, fragment_pairs):
        probs = torch.empty(len(fragment_pairs), dtype=torch.float32)
        for i, (frag1, frag2) in enumerate(fragment_pairs):
            probs[i] = self.probability(self.rewards(frag1), self.rewards(frag2))
        return probs

    def rewards(self, fragment):
        dtype = next(self.model.parameters()).dtype
        return self.model(fragment.obs.to(dtype), fragment.acts.to(dtype))

    def probability(self, rews1, rews2):
        if self.discount_factor == 1:
            returns_diff = (rews2 - rews1).sum(dim=0)
        else:
            discounts = self.discount_factor ** torch.arange(len(rews1))
            returns_diff = (discounts * (rews2 - rews1)).sum(dim=0)
        # clip, an overflow would harm the backward pass
        returns_diff = torch.clip(returns_diff, -self.threshold, self.threshold)
        model_probability = 1 / (1 + returns_diff.exp())
        return self.noise_prob * 0.5 + (1 - self.noise_prob) * model_probability


def build():
    torch.manual_seed(11)
    reward_net = BasicRewardNet()
    with torch.no_grad():
        for p in reward_net.parameters():
            p.abs_()
    fragments = [SimpleNamespace(obs=torch.rand(10, 4) * scale, acts=torch.rand(10, 2)) for scale in (0.9, 1.0, 0.2, 4.0, 1.1, 1.0)]
    fragment_pairs = [(fragments[0], fragments[1]), (fragments[2], fragments[3]), (fragments[4], fragments[5])]
    preference_model = PreferenceModel(reward_net.half())
    return SimpleNamespace(
        model=preference_model,
        fragment_pairs=fragment_pairs,
        preferences=torch.tensor([1.0, 1.0, 0.0]),
        optimizer=torch.optim.SGD(reward_net.parameters(), lr=1e-2),
    )


def run(s=None):
    s = s or build()
    probs = s.model(s.fragment_pairs)
    loss = nn.functional.binary_cross_entropy(probs, s.preferences)
    s.optimizer.zero_grad()
    loss.backward()
    s.optimizer.step()
    return loss
