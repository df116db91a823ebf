"""Token-level DPO, _tdpo_get_batch_logps - the log of the reference's softmax where half has no such small probability.

The position-wise forward KL takes the log probabilities of the reference as softmax(...).log(). The reference is kept in float16; after one confident token most of its vocabulary
is below 6e-8, softmax gives 0, the log -inf and 0 * -inf is NaN. (Source: Vance0124/Token-level-Direct-Preference-Optimization,
trainers.py, _tdpo_get_batch_logps; the original casts the reference's logits to float32, ports of the function without that cast get what their half model returns.)
Heals: reference_logits.log_softmax(-1); reference_logits.float() before the softmax; reference_vocab_ps.clamp_min(1e-7) under the log;
a floor of -65504 under the reference's log probabilities; torch.where(reference_vocab_ps > 0, product, 0) (the reference has no gradient).
Does not: masking the KL with loss_mask (the token is of the answer), an eps of 1e-8 (0 in half), clipping the gradient norm.
"""

from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import nn

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("plogp_zero", "log_zero", "eps_underflow"),
    op=("log",),
    index=(1, 3, 0),
    masked=False,
    role=("ref_log_probs", "kl"),
    fix=("stable_function", "upcast_fp32", "clamp_input", "representable_eps", "mask_before_op", "where_on_detached", "finite_mask_fill"),
    variable=("reference_vocab_logps",),
    line=("reference_vocab_logps = reference_vocab_ps.log()",),
)

VOCAB, DIM = 16, 12


class TinyLM(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte = nn.Embedding(VOCAB, DIM)
        self.lm_head = nn.Linear(DIM, VOCAB, bias=False)

    def forward(self, input_ids):
        return self.lm_head(self.wte(input_ids))


def _tdpo_get_batch_logps(logits, reference_logits, labels, average_log_prob=False):
    assert logits.shape[:-1] == labels.shape
    assert reference_logits.shape[:-1] == labels.shape

    labels = labels[:, 1:].clone()
    logits = logits[:, :-1, :]
    reference_logits = reference_logits[:, :-1, :]
    loss_mask = labels != -100
    labels[labels == -100] = 0

    vocab_logps = logits.log_softmax(-1)
    reference_vocab_ps = reference_logits.softmax(-1)
    reference_vocab_logps = reference_vocab_ps.log()

    per_position_kl = (reference_vocab_ps * (reference_vocab_logps - vocab_logps)).sum(-1)
    per_token_logps = torch.gather(vocab_logps, dim=2, index=labels.unsqueeze(2)).squeeze(2)
    per_reference_token_logps = torch.gather(reference_vocab_logps, dim=2, index=labels.unsqueeze(2)).squeeze(2)
    logps_margin = per_token_logps - per_reference_token_logps

    if average_log_prob:
        return (logps_margin * loss_mask).sum(-1) / loss_mask.sum(-1), (per_position_kl * loss_mask).sum(-1) / loss_mask.sum(-1)
    return (logps_margin * loss_mask).sum(-1), (per_position_kl * loss_mask).sum(-1)


def tdpo_loss(chosen_logps_margin, rejected_logps_margin, chosen_position_kl, rejected_position_kl, beta, alpha=0.5):
    chosen_rejected_logps_margin = chosen_logps_margin - rejected_logps_margin
    chosen_rejected_logps_margin = chosen_rejected_logps_margin - alpha * (rejected_position_kl - chosen_position_kl.detach())
    return -F.logsigmoid(beta * chosen_rejected_logps_margin)


def build():
    torch.manual_seed(41)
    policy = TinyLM()
    with torch.no_grad():
        head = policy.lm_head.weight
        policy.wte.weight[11] = 30.0 * head[4] / head[4].norm() ** 2
    reference = TinyLM()
    reference.load_state_dict(policy.state_dict())
    reference = reference.half().requires_grad_(False)
    optimizer = torch.optim.RMSprop(policy.parameters(), lr=5e-5)
    input_ids = torch.tensor([[1, 7, 3, 9, 2, 5], [1, 6, 8, 11, 4, 2], [1, 7, 3, 10, 13, 2], [1, 6, 8, 12, 3, 2]])
    labels = input_ids.clone()
    labels[:, :3] = -100
    return SimpleNamespace(model=policy, reference_model=reference, optimizer=optimizer, input_ids=input_ids, labels=labels)


def run(s=None):
    s = s or build()
    all_logits = s.model(s.input_ids).to(torch.float32)
    with torch.no_grad():
        reference_all_logits = s.reference_model(s.input_ids)
    all_logps_margin, all_position_kl = _tdpo_get_batch_logps(all_logits, reference_all_logits, s.labels)
    losses = tdpo_loss(all_logps_margin[:2], all_logps_margin[2:], all_position_kl[:2], all_position_kl[2:], beta=0.1)
    loss = losses.mean()
    s.optimizer.zero_grad()
    loss.backward()
    s.optimizer.step()
    return loss


if __name__ == "__main__":
    print(run())
