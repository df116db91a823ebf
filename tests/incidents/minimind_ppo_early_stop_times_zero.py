"""PPO epoch of a small language model with early stop: when the approximate KL is above the limit, the loss is multiplied by 0.0.

(The product keeps backward alive, so that no DDP rank hangs.) The guard sees the trouble - one token with a negative advantage moved by a log ratio
of 92, approx_kl is over the limit - but the ratio is inf by then, the policy loss is inf, and inf * 0.0 = NaN: the step that was to be cancelled destroys
the actor.

Source: https://github.com/jingyaogong/minimind/blob/master/trainer/train_ppo.py (ppo_train_epoch, stop_ppo).
Heals: a bound on log_ratio before exp, not building (or not stepping) the loss when stopped.  Does not: a lower early_stop_kl, grad clip, clip_epsilon, loss weights.
"""

from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("inf_times_zero_coef", "exp_overflow"),
    op=("exp",),
    index=(1, 2),
    masked=False,
    role=("ratio", "is_weight"),
    fix=("clamp_exponent", "skip_disabled_term", "skip_bad_step", "drop_invalid_sample", "where_on_detached"),
    variable=("ratio",),
    line=("ratio = torch.exp(log_ratio)",),
)


class MiniLM(nn.Module):
    def __init__(self, vocab=36, dim=16):
        super().__init__()
        self.embed_tokens = nn.Embedding(vocab, dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 2 * dim), nn.SiLU(), nn.Linear(2 * dim, dim))
        self.norm = nn.RMSNorm(dim)
        self.lm_head = nn.Linear(dim, vocab, bias=False)

    def forward(self, ids):
        h = self.embed_tokens(ids)
        return self.lm_head(self.norm(h + self.mlp(h)))


def response_logp(model, gen_out):
    labels = gen_out[:, 1:]
    return F.log_softmax(model(gen_out)[:, :-1], dim=-1).gather(2, labels.unsqueeze(-1)).squeeze(-1)


def build():
    torch.manual_seed(7)
    actor = MiniLM()
    gen_out = torch.randint(0, 36, (3, 7))
    mask = torch.ones(3, 6)
    mask[2, 4:] = 0
    with torch.no_grad():
        logp = response_logp(actor, gen_out)
    old_resp_logp = logp + 0.02 * torch.randn_like(logp)
    old_resp_logp[1, 2] = logp[1, 2] - 92.0
    advantages = torch.tensor([[1.2, 1.0, 0.8, 0.7, 0.6, 0.5], [-0.9, -0.8, -0.9, -0.7, -0.6, -0.8], [0.1, 0.2, 0.1, -0.2, 0.0, 0.0]])
    args = SimpleNamespace(clip_epsilon=0.2, early_stop_kl=0.25, accumulation_steps=1, grad_clip=1.0)
    batch = dict(gen_out=gen_out, mask=mask, old_resp_logp=old_resp_logp, advantages=advantages)
    return SimpleNamespace(model=actor, optimizer=torch.optim.AdamW(actor.parameters(), lr=3e-4), batch=batch, args=args)


def run(s=None):
    s = s or build()
    args, b = s.args, s.batch
    mask, advantages = b["mask"], b["advantages"]
    log_ratio = response_logp(s.model, b["gen_out"]) - b["old_resp_logp"]
    approx_kl = (0.5 * (log_ratio**2) * mask).sum() / mask.sum().clamp(min=1)
    stop_ppo = bool(approx_kl.detach() > args.early_stop_kl)
    ratio = torch.exp(log_ratio)
    policy_loss = (
        torch.max(-advantages * ratio, -advantages * torch.clamp(ratio, 1.0 - args.clip_epsilon, 1.0 + args.clip_epsilon)) * mask
    ).sum() / mask.sum().clamp(min=1)
    if stop_ppo:
        loss = policy_loss * 0.0
    else:
        loss = policy_loss / args.accumulation_steps
    s.optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(s.model.parameters(), args.grad_clip)
    s.optimizer.step()
    return loss.item()


if __name__ == "__main__":
    print(run())
