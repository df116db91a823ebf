"""verl kl_penalty "k3+": the value of k3 (clamped twice) with the gradient of k2, by the straight-through form b - b.detach() + f.detach().

The reference worker fills suppressed tokens with finfo.min before its log_softmax, and one sampled answer holds such a token: its reference log-prob is
-3.4e38. The k3 value is safe, clamped to [-20, 20] and [-10, 10]; but the k2 score that only lends its gradient squares the unclamped log ratio: inf,
and inf - inf is NaN on a token that counts.
Source: https://github.com/volcengine/verl/blob/main/verl/trainer/ppo/core_algos.py (kl_penalty, "straight through ... if the kl_penalty ends with '+'")
Heals: clamping the log ratio in the k2 score too, or a reference that is computed without the fill. Does not: the clamps of the k3 value, a smaller KL
coefficient, gradient clipping, nan_to_num on the loss (the gradient is infinite).
"""

from types import SimpleNamespace

import torch
from expected import Expected
from torch import nn

EXPECTED = Expected(
    phase=("forward",),
    cause=("magnitude_overflow", "inf_minus_inf"),
    op=("square", "pow"),
    index=(1, 3),
    masked=False,
    role=("kl", "loss", "log_ratio"),
    fix=("clamp_input", "fix_upstream", "finite_mask_fill", "drop_invalid_sample"),
    variable=(None,),
    line=("backward_score = 0.5 * (logprob - ref_logprob).square()",),
)

VOCAB, SUPPRESSED = 30, (27, 28)


class Actor(nn.Module):
    def __init__(self, width=20):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, width)
        self.rnn = nn.GRU(width, width, batch_first=True)
        self.lm_head = nn.Linear(width, VOCAB)

    def forward(self, ids):
        return self.lm_head(self.rnn(self.embed(ids))[0])


def kl_penalty_forward(logprob, ref_logprob, kl_penalty):
    if kl_penalty in ("kl", "k1"):
        return logprob - ref_logprob
    kl = torch.clamp(ref_logprob - logprob, min=-20, max=20)
    ratio = torch.exp(kl)
    kld = (ratio - kl - 1).contiguous()
    return torch.clamp(kld, min=-10, max=10)


def kl_penalty(logprob, ref_logprob, kl_penalty):
    forward_score = kl_penalty_forward(logprob, ref_logprob, kl_penalty.rstrip("+"))
    if not kl_penalty.endswith("+"):
        return forward_score
    backward_score = 0.5 * (logprob - ref_logprob).square()
    return backward_score - backward_score.detach() + forward_score.detach()


def masked_mean(values, mask):
    return (values * mask).sum() / mask.sum().clamp(min=1)


@torch.no_grad()
def reference_log_probs(ref, ids):
    logits = ref(ids[:, :-1])
    logits[..., list(SUPPRESSED)] = torch.finfo(logits.dtype).min
    return logits.log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)


def build():
    torch.manual_seed(7)
    actor, ref = Actor(), Actor()
    ref.load_state_dict(actor.state_dict())
    ids = torch.randint(0, 26, (4, 8))
    ids[1, 4] = SUPPRESSED[1]
    mask = torch.ones(4, 7)
    mask[:, :2] = 0
    mask[2, 5:] = 0
    with torch.no_grad():
        old = actor(ids[:, :-1]).log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)
    batch = {"ids": ids, "response_mask": mask, "old_log_probs": old, "advantages": torch.tensor([[0.9], [-0.2], [0.4], [-1.1]])}
    return SimpleNamespace(model=actor, ref=ref, optimizer=torch.optim.AdamW(actor.parameters(), lr=1e-4), batch=batch)


def run(s=None):
    s = s or build()
    b = s.batch
    for _ in range(2):
        log_prob = s.model(b["ids"][:, :-1]).log_softmax(-1).gather(-1, b["ids"][:, 1:, None]).squeeze(-1)
        ratio = torch.exp(torch.clamp(log_prob - b["old_log_probs"], -20, 20))
        pg = torch.max(-b["advantages"] * ratio, -b["advantages"] * ratio.clamp(0.8, 1.2))
        kld = kl_penalty(log_prob, reference_log_probs(s.ref, b["ids"]), "k3+")
        loss = masked_mean(pg, b["response_mask"]) + 0.001 * masked_mean(kld, b["response_mask"])
        s.optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(s.model.parameters(), 1.0)
        s.optimizer.step()
    return {"loss": loss.item(), "weights_finite": all(p.isfinite().all().item() for p in s.model.parameters())}


if __name__ == "__main__":
    print(run())
