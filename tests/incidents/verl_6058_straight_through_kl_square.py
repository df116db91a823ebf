"""verl's straight-through KL (`kl_penalty: low_var_kl+`): value of k3, gradient of k2, and the square of k2 overflows.

The "+" estimators return backward - backward.detach() + forward.detach(), with backward = 0.5 * (logprob - ref_logprob)^2. The forward estimator
is clamped on both sides and survives everything, which makes people look elsewhere. The reference model is smaller by a few special tokens; its
logits for them are filled with finfo.min, and the policy has sampled one: ref_logprob is -3.4e38, finite, the difference is finite, its square is
inf, and inf - inf is NaN in the value as well.
Source: https://github.com/verl-project/verl/pull/6058 and #2953 (kl_penalty with "+"); the same lines in https://github.com/OpenRLHF/OpenRLHF/pull/1101.
Heals: clamp the log ratio before squaring; fill the missing rows with a moderate number (-1e4); leave out samples with tokens unknown to the reference.
Does not: the clamps of the forward estimator, a smaller kl_coef, clipping the norm, clamping the result.
"""

import copy
from types import SimpleNamespace

import torch
from torch import nn

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("magnitude_overflow", "inf_minus_inf"),
    op=("square", "pow"),
    index=(1, 2),
    masked=False,
    role=("kl", "log_ratio"),
    fix=("clamp_input", "finite_mask_fill", "drop_invalid_sample"),
    variable=(None,),
    line=("backward_score = 0.5 * (logprob - ref_logprob).square()",),
)

VOCAB, REF_VOCAB = 32, 30


class TinyLM(nn.Module):
    def __init__(self, dim=24):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, dim)
        self.rnn = nn.GRU(dim, dim, batch_first=True)
        self.lm_head = nn.Linear(dim, VOCAB, bias=False)

    def forward(self, ids):
        return self.lm_head(self.rnn(self.embed(ids))[0])


def logprobs_from_logits(logits, responses):
    return torch.log_softmax(logits, dim=-1).gather(-1, responses.unsqueeze(-1)).squeeze(-1)


def kl_penalty_forward(logprob, ref_logprob):
    kl = torch.clamp(ref_logprob - logprob, min=-20, max=20)
    kld = torch.exp(kl) - kl - 1
    return torch.clamp(kld, min=-10, max=10)


def kl_penalty(logprob, ref_logprob):
    forward_score = kl_penalty_forward(logprob, ref_logprob)
    backward_score = 0.5 * (logprob - ref_logprob).square()
    return backward_score - backward_score.detach() + forward_score.detach()


def masked_mean(values, mask):
    return (values * mask).sum() / (mask.sum() + 1e-8)


def build():
    torch.manual_seed(11)
    actor = TinyLM()
    ref = copy.deepcopy(actor).requires_grad_(False)
    with torch.no_grad():  # a few updates behind us
        actor.lm_head.weight.add_(0.02 * torch.randn_like(actor.lm_head.weight))
    optimizer = torch.optim.AdamW(actor.parameters(), lr=1e-5)
    prompts = torch.tensor([[4, 9, 17], [6, 21, 2], [13, 8, 5]])
    responses = torch.tensor([[7, 12, 3, 19], [10, 25, 31, 14], [20, 11, 1, 0]])
    response_mask = torch.tensor([[1, 1, 1, 1], [1, 1, 1, 1], [1, 1, 1, 0]]).float()
    with torch.no_grad():
        ids = torch.cat([prompts, responses], 1)
        ref_logits = ref(ids)[:, 2:-1]
        unknown = torch.arange(VOCAB) >= REF_VOCAB
        ref_logits = ref_logits.masked_fill(unknown, torch.finfo(ref_logits.dtype).min)
        ref_log_prob = logprobs_from_logits(ref_logits, responses)
        old_log_prob = logprobs_from_logits(actor(ids)[:, 2:-1], responses)
    advantages = torch.tensor([[0.7], [-0.4], [-0.3]]) * response_mask
    batch = dict(
        ids=ids,
        responses=responses,
        response_mask=response_mask,
        ref_log_prob=ref_log_prob,
        old_log_prob=old_log_prob,
        advantages=advantages,
    )
    return SimpleNamespace(model=actor, optimizer=optimizer, batch=batch)


def run(s=None):
    s = s or build()
    b = s.batch
    log_prob = logprobs_from_logits(s.model(b["ids"])[:, 2:-1], b["responses"])
    ratio = torch.exp(log_prob - b["old_log_prob"])
    pg_losses = torch.max(-b["advantages"] * ratio, -b["advantages"] * ratio.clamp(0.8, 1.2))
    pg_loss = masked_mean(pg_losses, b["response_mask"])
    kld = kl_penalty(log_prob, b["ref_log_prob"])
    kl_loss = masked_mean(kld, b["response_mask"])
    policy_loss = pg_loss + 0.001 * kl_loss
    s.optimizer.zero_grad()
    policy_loss.backward()
    nn.utils.clip_grad_norm_(s.model.parameters(), 1.0)
    s.optimizer.step()
    return pg_loss.item(), policy_loss.item()


if __name__ == "__main__":
    print(run())
