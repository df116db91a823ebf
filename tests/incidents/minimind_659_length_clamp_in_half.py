"""MiniMind #659: dpo_loss divides by seq_lengths = mask.sum(1).clamp_min(1e-8), meant to prevent the NaN of a zero-length mask.

Source: https://github.com/jingyaogong/minimind/issues/659 (trainer/train_dpo.py, dpo_loss). Here the loader makes the masks in the training dtype,
half. 1e-8 is no half number: it rounds to 0, so the clamp does nothing and the truncated answer (an empty mask) gives 0/0.
Heals: lengths in fp32, a bound that half can hold (1.0), leaving the empty pair out. Tempting and useless: a smaller epsilon added to the
sum (mask.sum(1) + 1e-8), the same number again.
"""

from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("eps_underflow", "zero_div_zero", "empty_mask_mean"),
    op=("div",),
    index=(4,),
    masked=None,
    role=("ref_log_probs", "log_probs"),
    fix=(
        "representable_eps",
        "upcast_fp32",
        "clamp_denominator",
        "guard_empty",
        "drop_invalid_sample",
        "fix_upstream",
        "reject_input",
        "clamp_input",
    ),
    variable=("ref_log_probs", "policy_log_probs"),
    line=(
        "ref_log_probs = (ref_log_probs * mask).sum(dim=1) / seq_lengths.squeeze()",
        "policy_log_probs = (policy_log_probs * mask).sum(dim=1) / seq_lengths.squeeze()",
    ),
)


class MiniMindForCausalLM(nn.Module):
    def __init__(self, vocab=32, dim=16):
        super().__init__()
        self.embed_tokens = nn.Embedding(vocab, dim)
        self.norm = nn.LayerNorm(dim)
        self.lm_head = nn.Linear(dim, vocab, bias=False)

    def forward(self, input_ids):
        h = self.embed_tokens(input_ids)
        h = h.cumsum(dim=1) / torch.arange(1, h.shape[1] + 1).view(1, -1, 1)
        return self.lm_head(self.norm(h))


def logits_to_log_probs(logits, labels):
    log_probs = F.log_softmax(logits, dim=2)
    return torch.gather(log_probs, dim=2, index=labels.unsqueeze(2)).squeeze(-1)


def dpo_loss(ref_log_probs, policy_log_probs, mask, beta):
    seq_lengths = mask.sum(dim=1, keepdim=True).clamp_min(1e-8)  # a zero-length mask must not divide by zero
    ref_log_probs = (ref_log_probs * mask).sum(dim=1) / seq_lengths.squeeze()
    policy_log_probs = (policy_log_probs * mask).sum(dim=1) / seq_lengths.squeeze()

    batch_size = ref_log_probs.shape[0]
    chosen_ref, reject_ref = ref_log_probs[: batch_size // 2], ref_log_probs[batch_size // 2 :]
    chosen_policy, reject_policy = policy_log_probs[: batch_size // 2], policy_log_probs[batch_size // 2 :]

    pi_logratios = chosen_policy - reject_policy
    ref_logratios = chosen_ref - reject_ref
    logits = pi_logratios - ref_logratios
    return -F.logsigmoid(beta * logits).mean()


def build():
    torch.manual_seed(659)
    model, ref_model = MiniMindForCausalLM(), MiniMindForCausalLM()
    ref_model.load_state_dict(model.state_dict())
    ref_model.eval().requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-5)
    ids = torch.randint(1, 32, (6, 12))  # chosen 0..2, rejected 3..5
    mask = torch.zeros(6, 11, dtype=torch.float16)
    for row, (start, end) in enumerate([(4, 11), (3, 9), (5, 11), (4, 10), (11, 11), (5, 8)]):
        mask[row, start:end] = 1.0  # the prompt of pair 1 with its rejected answer filled max_seq_len
    return SimpleNamespace(model=model, ref_model=ref_model, optimizer=optimizer, x=ids[:, :-1], y=ids[:, 1:], mask=mask, beta=0.15)


def run(s=None):
    s = s or build()
    with torch.no_grad():
        ref_log_probs = logits_to_log_probs(s.ref_model(s.x), s.y)
    policy_log_probs = logits_to_log_probs(s.model(s.x), s.y)
    loss = dpo_loss(ref_log_probs, policy_log_probs, s.mask, s.beta)
    s.optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(s.model.parameters(), 1.0)
    s.optimizer.step()
    return loss
