"""NeMo-RL #876 - the reference KL clamps its log ratio at +-20, and the log-probs are float16.

exp(20) is 4.9e8, and half precision ends at 65504: already a log ratio of 11.1 overflows below the clamp. One response token that the
policy has all but given up sits at about 14 nats below the reference, its exp is inf and so are the k3 penalty and its gradient.
Source: https://github.com/NVIDIA-NeMo/RL/pull/876 (review of 2025-09-17). Computing the penalty in float32 or a clamp below 11 heals;
clamping the penalty afterwards repairs the loss and leaves 0 * inf in the gradient.
"""

from types import SimpleNamespace

import torch
import torch.nn as nn

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("fp16_overflow", "exp_overflow"),
    op=("exp",),
    index=(1, 2),
    masked=False,
    role=("kl", "ratio"),
    fix=("upcast_fp32", "clamp_exponent"),
    variable=("ratio",),
    line=("ratio = torch.exp(r)",),
)


class Policy(nn.Module):
    def __init__(self, vocab=10, dim=8):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.lm_head = nn.Linear(dim, vocab)

    def forward(self, ids):
        return self.lm_head(self.embed(ids))


def token_logprobs(model, ids):
    logits = model(ids[:, :-1])
    return logits.log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)


def kl_penalty(logprobs_policy, logprobs_reference, clamp_value=20.0):
    r = logprobs_reference - logprobs_policy
    r = r.clamp(min=-clamp_value, max=clamp_value)
    ratio = torch.exp(r)
    return ratio - r - 1


def build():
    torch.manual_seed(876)
    policy = Policy().half()
    reference = Policy().half()
    reference.load_state_dict(policy.state_dict())
    with torch.no_grad():
        policy.lm_head.bias[6] -= 14.0
    ids = torch.tensor([[1, 3, 5, 2, 7], [4, 8, 2, 6, 9]])
    mask = torch.tensor([[0.0, 1, 1, 1], [0.0, 1, 1, 1]])
    return SimpleNamespace(
        model=policy,
        reference=reference,
        optimizer=torch.optim.SGD(policy.parameters(), lr=1e-3),
        ids=ids,
        token_mask=mask,
        advantages=torch.tensor([[0.8], [-0.5]], dtype=torch.float16),
        kl_weight=0.01,
    )


def run(s=None):
    s = s or build()
    curr_logprobs = token_logprobs(s.model, s.ids)
    with torch.no_grad():
        ref_logprobs = token_logprobs(s.reference, s.ids)
    ratios = (curr_logprobs - curr_logprobs.detach()).exp()
    actor_loss = -(ratios * s.advantages)
    kl = s.kl_weight * kl_penalty(curr_logprobs, ref_logprobs)
    loss = ((actor_loss + kl) * s.token_mask).sum() / s.token_mask.sum()
    s.optimizer.zero_grad()
    loss.backward()
    s.optimizer.step()
    return loss


if __name__ == "__main__":
    print(run())
