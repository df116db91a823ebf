"""SPO (Single-stream Policy Optimization) - the value tracker of a prompt is a Beta belief that starts with N0 = 1 / (1 - rho_min) pseudo-counts.

The baseline of a prompt is alpha / (alpha + beta) with alpha = N0 * v0 and beta = N0 * (1 - v0); old counts are forgotten by rho, between rho_min and
rho_max after the KL since the prompt was last seen. An ablation "no forgetting" sets both to 1: N0 = 1 / 0 = inf, the belief is inf or inf * 0, and
the baseline inf / inf is NaN. The whole batch is normalised with it.

Source: https://github.com/verl-project/verl/pull/3503 (recipe/spo), tracker of arXiv 2509.13232
Heals: rejecting rho >= 1 in the config, a floor under 1 - rho. Does not: an eps in the std of the advantages, clamping alpha and beta away from 0,
dropping prompts with v0 of 0 or 1, gradient clipping.
"""

from types import SimpleNamespace

import torch
from torch import nn

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("zero_denominator",),
    op=("div",),
    index=(0,),
    masked=None,
    role=("hidden", "advantages"),
    fix=("validate_config", "clamp_denominator", "avoid_singular_op"),
    variable=("n_eff",),
    line=("n_eff = torch.ones_like(v0) / (1.0 - self.rho_min)",),
)


class ValueTracker(nn.Module):
    """Success probability per prompt, kept in buffers so that it is saved with the trainer."""

    def __init__(self, n_prompts, rho_min=0.875, rho_max=0.96, d_half=0.06):
        super().__init__()
        self.d_half = d_half
        self.register_buffer("rho_min", torch.tensor(rho_min))
        self.register_buffer("rho_max", torch.tensor(rho_max))
        self.register_buffer("alpha", torch.ones(n_prompts))
        self.register_buffer("beta", torch.ones(n_prompts))

    @torch.no_grad()
    def init_from_offline(self, v0):
        n_eff = torch.ones_like(v0) / (1.0 - self.rho_min)
        self.alpha.copy_(n_eff * v0)
        self.beta.copy_(n_eff * (1.0 - v0))

    def baseline(self, uid):
        return self.alpha[uid] / (self.alpha[uid] + self.beta[uid])

    @torch.no_grad()
    def update(self, uid, rewards, kl):
        rho = torch.pow(2.0, -kl / self.d_half).clamp(self.rho_min, self.rho_max)
        self.alpha[uid] = rho * self.alpha[uid] + rewards
        self.beta[uid] = rho * self.beta[uid] + (1.0 - rewards)


class TinyPolicy(nn.Module):
    def __init__(self, vocab=19, dim=16):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.mix = nn.GRU(dim, dim, batch_first=True)
        self.lm_head = nn.Linear(dim, vocab)

    def forward(self, ids):
        return self.lm_head(self.mix(self.embed(ids))[0])


def token_log_probs(model, ids):
    return torch.log_softmax(model(ids[:, :-1]), -1).gather(-1, ids[:, 1:, None]).squeeze(-1)


def build(rho_min=1.0, rho_max=1.0):
    torch.manual_seed(13232)
    model = TinyPolicy()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    tracker = ValueTracker(12, rho_min=rho_min, rho_max=rho_max)
    n = 8
    return SimpleNamespace(
        model=model,
        optimizer=optimizer,
        tracker=tracker,
        v0=torch.randint(0, 9, (12,)) / 8.0,
        batch={
            "uid": torch.randperm(12)[:n],
            "ids": torch.randint(0, 19, (n, 10)),
            "mask": (torch.arange(9) < torch.randint(4, 10, (n, 1))).float(),
            "rewards": torch.randint(0, 2, (n,)).float(),
            "kl": torch.rand(n) * 0.02,
        },
    )


def run(s=None):
    s = s or build()
    b = s.batch
    s.tracker.init_from_offline(s.v0)
    with torch.no_grad():
        old_log_probs = token_log_probs(s.model, b["ids"])
        advantages = b["rewards"] - s.tracker.baseline(b["uid"])
        advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-6)
        s.tracker.update(b["uid"], b["rewards"], b["kl"])
    losses = []
    for _ in range(2):
        ratio = torch.exp(token_log_probs(s.model, b["ids"]) - old_log_probs)
        adv = advantages[:, None]
        pg = torch.maximum(-adv * ratio, -adv * ratio.clamp(0.8, 1.28))
        loss = (pg * b["mask"]).sum() / b["mask"].sum()
        s.optimizer.zero_grad()
        loss.backward()
        s.optimizer.step()
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    print(run())
