"""The entropy bonus multiplies probabilities by their bare logarithm; an illegal action has probability 0 and 0 * log(0) is NaN.
https://github.com/pyro-ppl/numpyro/pull/2276
"""

from types import SimpleNamespace

import torch
import torch.nn as nn

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("plogp_zero", "log_zero"),
    op=("log", "mul"),
    index=(2, 4),
    masked=False,
    role=("entropy",),
    fix=("stable_function", "finite_mask_fill", "clamp_input"),
    variable=(None,),
    line=("return -(self.probs * torch.log(self.probs)).sum(-1)",),
)


class CategoricalProbs:
    def __init__(self, probs):
        self.probs = probs

    def log_prob(self, value):
        return torch.log(self.probs.gather(-1, value.unsqueeze(-1)).squeeze(-1))

    def entropy(self):
        return -(self.probs * torch.log(self.probs)).sum(-1)


class MaskedActor(nn.Module):
    def __init__(self, obs=6, actions=7):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(obs, 12), nn.ReLU(), nn.Linear(12, actions))

    def forward(self, obs, legal):
        logits = self.net(obs).masked_fill(~legal, float("-inf"))
        return CategoricalProbs(torch.softmax(logits, dim=-1))


def build():
    torch.manual_seed(2276)
    actor = MaskedActor()
    legal = torch.ones(5, 7, dtype=torch.bool)
    legal[2, 4:6] = False
    batch = {"obs": torch.randn(5, 6), "legal": legal, "action": torch.tensor([0, 6, 2, 5, 3]), "adv": torch.randn(5)}
    return SimpleNamespace(model=actor, optimizer=torch.optim.RMSprop(actor.parameters(), lr=7e-4), batch=batch)


def run(s=None):
    s = s or build()
    b = s.batch
    dist = s.model(b["obs"], b["legal"])
    action_loss = -(b["adv"] * dist.log_prob(b["action"])).mean()
    loss = action_loss - 0.01 * dist.entropy().mean()
    s.optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(s.model.parameters(), 0.5)
    s.optimizer.step()
    return loss
