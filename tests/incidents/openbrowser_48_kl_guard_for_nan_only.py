"""Flow-GRPO of a diffusion language model: exp of the summed log ratio to the reference is inf, and the guard asks for NaN.

The trainer's k3 term takes log probabilities of whole trajectories: the sum over 48 denoised tokens. After the policy has walked away from the
reference by two or three nats a token, exp(ref - new) overflows for one trajectory. The guard replaces a NaN KL by 0; inf is no NaN.
Source: https://github.com/billy-enrizky/openbrowser-ai/pull/48 ("kl_loss Inf guard is incomplete - exp(log_r) can overflow").
Heals: clamping log_r before exp. Does not: the isnan guard, clamping the KL after exp (0 * inf in backward), a smaller kl_coeff.
"""

from types import SimpleNamespace

import torch
from torch import nn

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("seq_ratio_overflow", "exp_overflow"),
    op=("exp",),
    index=(1,),
    masked=None,
    role=("kl", "ratio"),
    fix=("clamp_exponent",),
    variable=(None,),
    line=("kl_loss = (torch.exp(log_r) - log_r - 1).mean()",),
)


class Denoiser(nn.Module):
    def __init__(self, vocab=32, dim=12):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.head = nn.Linear(dim, vocab)

    def trajectory_log_prob(self, x_t, x_next):
        logp = self.head(self.embed(x_t)).log_softmax(-1)
        return logp.gather(-1, x_next[..., None]).squeeze(-1).sum(-1)


def build():
    torch.manual_seed(48)
    ref, policy = Denoiser(), Denoiser()
    policy.load_state_dict(ref.state_dict())
    ref.requires_grad_(False)
    x_t = torch.randint(0, 32, (3, 48))
    x_next = torch.randint(0, 24, (3, 48))
    x_next[1] = torch.randint(24, 32, (48,))
    with torch.no_grad():
        policy.head.bias[24:] -= 2.5  # what the policy has learned to avoid
    batch = dict(x_t=x_t, x_next=x_next, advantages=torch.tensor([0.7, -1.1, 0.4]))
    return SimpleNamespace(model=policy, ref=ref, optimizer=torch.optim.AdamW(policy.parameters(), lr=1e-4), batch=batch, kl_coeff=0.04)


def run(s=None):
    s = s or build()
    b = s.batch
    with torch.no_grad():
        old_log_prob = s.model.trajectory_log_prob(b["x_t"], b["x_next"])
        ref_log_prob = s.ref.trajectory_log_prob(b["x_t"], b["x_next"])
    for _ in range(2):
        log_prob = s.model.trajectory_log_prob(b["x_t"], b["x_next"])
        ratio = torch.exp(log_prob - old_log_prob)
        adv = b["advantages"]
        policy_loss = -torch.min(ratio * adv, ratio.clamp(0.8, 1.2) * adv).mean()
        log_r = ref_log_prob - log_prob
        kl_loss = (torch.exp(log_r) - log_r - 1).mean()
        if torch.isnan(kl_loss):
            kl_loss = torch.tensor(0.0)
        step_loss = policy_loss + s.kl_coeff * kl_loss
        s.optimizer.zero_grad()
        step_loss.backward()
        nn.utils.clip_grad_norm_(s.model.parameters(), 1.0)
        s.optimizer.step()
    return float(step_loss.detach())


if __name__ == "__main__":
    print(run())
