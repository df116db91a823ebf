"""LLaMA-Factory's EAFT loss weights each token by the entropy of the 20 largest logits.

One task of the mixture is classification: its logits are masked to the 12 tokens that may open a label. Fewer than 20 are finite, so the
top 20 hold -inf, whose probability is 0 and whose log-probability is -inf: 0 * -inf in the entropy. The weight of every such token is
NaN, and with it the loss. The -inf vocabulary mask itself does no harm: the cross entropy of the labels is finite.

Source: https://github.com/hiyouga/LLaMA-Factory/blob/main/src/llamafactory/train/trainer_utils.py (_eaft_cross_entropy)
Heals: entropy with the -inf log-probabilities set to 0 first, or a finite mask value. Does not: computing the entropy in float64,
nor nan_to_num of the loss (the loss reads 0, the gradient is NaN: 0 times the NaN weight).
"""

from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F
from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("plogp_zero",),
    op=("mul",),
    index=(4, 12),
    masked=None,
    role=("entropy",),
    fix=("stable_function", "finite_mask_fill", "mask_before_op", "clamp_input"),
    variable=(None,),
    line=("entropy_approx = -(probs_topk * log_probs_topk).sum(dim=-1)",),
)

IGNORE_INDEX = -100
LABEL_TOKENS = torch.arange(20, 32)


class CausalLM(nn.Module):
    def __init__(self, vocab=48, dim=16):
        super().__init__()
        self.embed_tokens = nn.Embedding(vocab, dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 32), nn.SiLU(), nn.Linear(32, dim))
        self.lm_head = nn.Linear(dim, vocab, bias=False)

    def forward(self, input_ids):
        hidden = self.embed_tokens(input_ids)
        hidden = hidden + self.mlp(hidden)
        return self.lm_head(hidden)


def eaft_cross_entropy(source, target, alpha=1.0):
    per_token_loss = F.cross_entropy(source, target, ignore_index=IGNORE_INDEX, reduction="none")
    valid_mask = target != IGNORE_INDEX
    if not valid_mask.any():
        return source.new_zeros(())
    valid_losses = per_token_loss[valid_mask]
    with torch.no_grad():
        source_detached = source[valid_mask].detach()
        topk_val, _ = torch.topk(source_detached, k=20, dim=-1)
        logsumexp_topk = torch.logsumexp(topk_val, dim=-1, keepdim=True)
        log_probs_topk = topk_val - logsumexp_topk
        probs_topk = torch.exp(log_probs_topk)
        entropy_approx = -(probs_topk * log_probs_topk).sum(dim=-1)
        adaptive_weight = torch.pow(entropy_approx / 3.0, alpha)
    return (valid_losses * adaptive_weight).mean()


def build():
    torch.manual_seed(2102)
    model = CausalLM()
    input_ids = torch.randint(0, 20, (3, 7))
    labels = input_ids.clone()
    labels[:, :3] = IGNORE_INDEX
    is_classification = torch.tensor([False, True, False])
    labels[1, 3:] = torch.tensor([24, IGNORE_INDEX, IGNORE_INDEX, IGNORE_INDEX])
    legal = torch.ones(3, 48, dtype=torch.bool)
    legal[is_classification] = False
    legal[1, LABEL_TOKENS] = True
    return SimpleNamespace(
        model=model, input_ids=input_ids, labels=labels, legal=legal, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-4)
    )


def run(s=None):
    s = s or build()
    logits = s.model(s.input_ids).float()
    logits = logits.masked_fill(~s.legal[:, None, :], float("-inf"))
    labels = F.pad(s.labels, (0, 1), value=IGNORE_INDEX)
    shift_labels = labels[..., 1:].contiguous().view(-1)
    loss = eaft_cross_entropy(logits.view(-1, logits.size(-1)), shift_labels)
    s.optimizer.zero_grad()
    loss.backward()
    s.grad_norm = nn.utils.clip_grad_norm_(s.model.parameters(), 1.0)
    s.optimizer.step()
    return loss
