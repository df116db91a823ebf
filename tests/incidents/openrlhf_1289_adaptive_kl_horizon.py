"""The adaptive KL controller divides by its horizon, and the configuration says 0: after the first update the coefficient is infinite.
https://github.com/OpenRLHF/OpenRLHF/pull/1289

The first PPO step is healthy; the second one shapes its rewards with the infinite coefficient.
Heals: a positive horizon (refuse 0 at construction). Does not: nan_to_num on the shaped rewards, their sum leaves float32 again.
"""

from types import SimpleNamespace

import torch
import torch.nn as nn

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("zero_denominator",),
    op=("div",),
    index=(),
    masked=None,
    role=("kl", "rewards"),
    fix=("validate_config", "clamp_denominator"),
    variable=(None,),
    line=("mult = 1 + proportional_error * n_steps / self.horizon",),
)


class AdaptiveKLController:
    """Ziegler et al., section 2.2."""

    def __init__(self, init_kl_coef, target, horizon):
        self.value = init_kl_coef
        self.target = target
        self.horizon = horizon

    def update(self, current, n_steps):
        proportional_error = torch.clamp(current / self.target - 1, -0.2, 0.2)
        mult = 1 + proportional_error * n_steps / self.horizon
        self.value = self.value * mult


class Actor(nn.Module):
    def __init__(self, vocab=19, width=12):
        super().__init__()
        self.emb = nn.Embedding(vocab, width)
        self.rnn = nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, vocab)
        self.value = nn.Linear(width, 1)

    def forward(self, ids):
        h, _ = self.rnn(self.emb(ids[:, :-1]))
        logp = self.head(h).log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)
        return logp, self.value(h).squeeze(-1)


def masked_mean(x, mask):
    return (x * mask).sum() / mask.sum()


def compute_reward(score, kl_coef, kl, action_mask):
    reward = -kl_coef * kl
    last = action_mask.long().cumsum(-1).argmax(-1)
    return reward.scatter_add(1, last[:, None], score[:, None]) * action_mask


@torch.no_grad()
def make_experience(actor, ref, batch, kl_coef):
    logp, values = actor(batch["ids"])
    ref_logp, _ = ref(batch["ids"])
    kl = (logp - ref_logp) * batch["mask"]
    rewards = compute_reward(batch["score"], kl_coef, kl, batch["mask"])
    returns = rewards.flip(1).cumsum(1).flip(1)
    adv = returns - values
    mean = masked_mean(adv, batch["mask"])
    adv = (adv - mean) * (masked_mean((adv - mean) ** 2, batch["mask"]) + 1e-8).rsqrt()
    return logp, adv, returns, (kl.sum(1) / batch["mask"].sum(1)).mean()


def build():
    torch.manual_seed(1289)
    actor, ref = Actor(), Actor()
    ref.load_state_dict(actor.state_dict())
    with torch.no_grad():
        ref.head.weight.add_(0.3 * torch.randn_like(ref.head.weight))
    batches = []
    for _ in range(2):
        mask = torch.ones(4, 7)
        mask[:, :2] = 0
        mask[1, 5:] = 0
        batches.append(dict(ids=torch.randint(0, 19, (4, 8)), mask=mask, score=torch.randn(4)))
    optimizer = torch.optim.AdamW(actor.parameters(), lr=1e-4)
    return SimpleNamespace(model=actor, ref=ref, optimizer=optimizer, batch=batches, kl_ctl=AdaptiveKLController(0.1, 6.0, 0))


def run(s=None):
    s = s or build()
    for batch in s.batch:
        old_logp, adv, returns, kl = make_experience(s.model, s.ref, batch, s.kl_ctl.value)
        logp, values = s.model(batch["ids"])
        ratio = (logp - old_logp).exp()
        policy_loss = -torch.min(ratio * adv, ratio.clamp(0.8, 1.2) * adv)
        loss = masked_mean(policy_loss, batch["mask"]) + 0.5 * masked_mean((values - returns) ** 2, batch["mask"])
        s.optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(s.model.parameters(), 1.0)
        s.optimizer.step()
        s.kl_ctl.update(kl, n_steps=4)
    return loss
