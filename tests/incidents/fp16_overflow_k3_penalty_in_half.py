"""The k3 KL penalty is taken on half-precision log-probs; a log ratio of 12 is harmless in float32 and exp(12) is
already inf in float16.
"""

from types import SimpleNamespace

import torch
from torch import nn

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("fp16_overflow", "exp_overflow"),
    op=("exp", "expm1"),
    index=(14,),
    masked=False,
    role=("kl", "ratio"),
    fix=("upcast_fp32", "clamp_exponent"),
    variable=("inv_ratio",),
    line=("inv_ratio = delta.exp()",),
)


def k3(current, reference):
    delta = reference - current
    inv_ratio = delta.exp()
    return inv_ratio - delta - 1


def flat_logps(model, packed_ids, next_ids):
    logits = model(packed_ids)
    return torch.log_softmax(logits, dim=-1)[torch.arange(len(next_ids)), next_ids]


def build():
    torch.manual_seed(112)
    policy = nn.Sequential(nn.Embedding(20, 8), nn.Linear(8, 20))
    reference = nn.Sequential(nn.Embedding(20, 8), nn.Linear(8, 20))
    reference.load_state_dict(policy.state_dict())
    with torch.no_grad():
        policy[0].weight.add_(0.05 * torch.randn(20, 8))
        policy[1].bias[11] -= 12.4  # the policy has all but unlearned token 11
    policy, reference = policy.half(), reference.half().requires_grad_(False)
    packed_ids = torch.randint(0, 11, (24,))
    next_ids = torch.randint(0, 11, (24,))
    next_ids[[14, 20]] = 11
    batch = {"packed_ids": packed_ids, "next_ids": next_ids, "adv": torch.randn(24).half(), "loss_mask": torch.arange(24) % 8 >= 2}
    batch["loss_mask"][20] = True
    return SimpleNamespace(model=policy, reference=reference, optimizer=torch.optim.SGD(policy.parameters(), lr=1e-3), batch=batch)


def run(s=None):
    s = s or build()
    b = s.batch
    logp = flat_logps(s.model, b["packed_ids"], b["next_ids"])
    with torch.inference_mode():
        ref_logp = flat_logps(s.reference, b["packed_ids"], b["next_ids"])
    ref_logp = ref_logp.clone()
    pg = -b["adv"] * torch.exp(logp - logp.detach())
    per_token = pg + 0.02 * k3(logp, reference=ref_logp)
    loss = per_token[b["loss_mask"]].float().mean()
    loss.backward()
    s.optimizer.step()
    return loss
