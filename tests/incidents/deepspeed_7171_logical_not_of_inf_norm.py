"""DeepSpeed ZeRO, a norm of gradients that leaves float32 times logical_not - PPO step in bf16 style without overflow check.

The parameter norms are taken in double, their sum of squares is cast to float32 and becomes inf although every gradient is finite (PPO's maximum leaves a stale token of negative advantage
unclipped). The check then computes inf_or_nan * -1 + inf_or_nan.logical_not() * total_norm: 0 * inf is NaN, the clip factor is NaN, and so is every weight.
Source: https://github.com/deepspeedai/DeepSpeed/pull/7171 (issue 5242), deepspeed/runtime/zero/stage_1_and_2.py (get_grad_norm_direct, unscale_and_clip_grads).
Heals: skip the step whose norm is not finite, keep the norm in double to the end (or vector_norm of the norms without squaring them in float32), select with torch.where instead of the product
(the project's fix), clamp the log ratio or bound the ratio (dual clip), leave the stale token out. Does not: a smaller clip_grad, a larger epsilon.
"""

from types import SimpleNamespace

import torch
import torch.nn as nn
from expected import Expected

EXPECTED = Expected(
    phase=("optimizer",),
    cause=("inf_grad_norm_clip", "magnitude_overflow", "inf_times_zero_mask"),
    op=("float", "to", "_to_copy"),
    index=(),
    masked=None,
    role=("grad", "optimizer"),
    fix=(
        "skip_bad_step",
        "upcast_fp32",
        "where_on_detached",
        "stable_function",
        "mask_before_op",
        "clamp_input",
        "clamp_exponent",
        "drop_invalid_sample",
    ),
    variable=("total_norm",),
    line=("total_norm = torch.stack(all_norms).square().sum().float()",),
)


class Actor(nn.Module):
    def __init__(self, vocab=16, dim=8):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.mlp = nn.Sequential(nn.Linear(dim, dim), nn.Tanh())
        self.lm_head = nn.Linear(dim, vocab, bias=False)

    def forward(self, input_ids):
        return self.lm_head(self.mlp(self.embed(input_ids)))


class ZeroOptimizer:
    def __init__(self, params, lr=1e-3, clip_grad=1.0):
        self.params = list(params)
        self.optimizer = torch.optim.AdamW(self.params, lr=lr)
        self.clip_grad = clip_grad
        self.loss_scale = 1.0

    def get_grad_norm_direct(self, gradients, norm_type=2):
        all_norms = []
        for g in gradients:
            all_norms.append(torch.norm(g.data.double().detach(), norm_type))
        total_norm = torch.stack(all_norms).square().sum().float()
        total_norm = total_norm.pow(1.0 / norm_type)

        norm_is_inf = total_norm.isinf()
        norm_is_nan = total_norm.isnan()
        inf_or_nan = norm_is_nan.logical_or(norm_is_inf)

        err = torch.tensor(-1.0, dtype=torch.float)
        total_norm = inf_or_nan * err + inf_or_nan.logical_not() * total_norm
        return total_norm

    def unscale_and_clip_grads(self, grad_groups_flat, total_norm):
        combined_scale = self.loss_scale
        if self.clip_grad > 0.0:
            clip = ((total_norm / self.loss_scale) + 1e-6) / self.clip_grad
            clip = torch.clamp(clip, min=1.0)
            combined_scale = clip * self.loss_scale
        for grad in grad_groups_flat:
            grad.data.mul_(1.0 / combined_scale)

    def step(self):
        grads = [p.grad for p in self.params if p.grad is not None]
        scaled_global_grad_norm = self.get_grad_norm_direct(grads)
        self.unscale_and_clip_grads(grads, scaled_global_grad_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()


def actor_loss_fn(logprobs, old_logprobs, advantages, mask, cliprange=0.2):
    log_ratio = (logprobs - old_logprobs) * mask
    ratio = torch.exp(log_ratio)
    pg_loss1 = -advantages * ratio
    pg_loss2 = -advantages * torch.clamp(ratio, 1.0 - cliprange, 1.0 + cliprange)
    return torch.sum(torch.max(pg_loss1, pg_loss2) * mask) / mask.sum()


def build():
    torch.manual_seed(1)
    model = Actor()
    optimizer = ZeroOptimizer(model.parameters())
    input_ids = torch.randint(0, 16, (3, 8))
    with torch.no_grad():
        logprobs = model(input_ids[:, :-1]).log_softmax(-1).gather(-1, input_ids[:, 1:, None]).squeeze(-1)
    old_logprobs = logprobs + 0.05 * torch.randn(3, 7)
    old_logprobs[1, 4] = logprobs[1, 4] - 48.0
    advantages = torch.randn(3, 7)
    advantages[1] = -1.2
    mask = torch.ones(3, 7)
    mask[0, 5:] = 0
    return SimpleNamespace(
        model=model, optimizer=optimizer, input_ids=input_ids, old_logprobs=old_logprobs, advantages=advantages, mask=mask
    )


def run(s=None):
    s = s or build()
    logits = s.model(s.input_ids[:, :-1])
    logprobs = logits.log_softmax(-1).gather(-1, s.input_ids[:, 1:, None]).squeeze(-1)
    loss = actor_loss_fn(logprobs, s.old_logprobs, s.advantages, s.mask)
    loss.backward()
    s.optimizer.step()
    return loss


if __name__ == "__main__":
    print(run())
