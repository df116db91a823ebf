"""TRL, entropy_from_logits of half logits with a suppressed vocabulary - GRPO with an entropy bonus.

Suppressed tokens carry finfo(float16).min. Where the row's logsumexp passes 16, log_softmax stores -65504 - lse in half, which is -inf, and exp(logps) * logps is 0 * -inf.
Rows with small logits are not hurt. Source: https://github.com/huggingface/trl/issues/7221 (third case), trl/trainer/utils.py (entropy_from_logits).
Heals: log_softmax in float32, a milder fill (-1e4), clamp the logits from below, zero logps where it is -inf before the product, logsumexp minus the
expected logit.
Does not: nan_to_num on the product (PR 7251; the gradient stays NaN), xlogy(probs, probs) and special.entr (the gradient at probability 0 is inf * 0), a smaller coefficient, clipping.
"""

from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F
from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("fp16_overflow", "plogp_zero"),
    op=("log_softmax",),
    index=(3, 5),
    masked=False,
    role=("log_probs", "entropy"),
    fix=("upcast_fp32", "finite_mask_fill", "mask_before_op", "clamp_input", "stable_function", "where_on_detached"),
    variable=("logps",),
    line=("logps = F.log_softmax(chunk, dim=-1)",),
)


def entropy_from_logits(logits, chunk_size=128):
    original_shape = logits.shape[:-1]
    num_classes = logits.shape[-1]
    flat_logits = logits.reshape(-1, num_classes)
    entropies = []
    for chunk in flat_logits.split(chunk_size, dim=0):
        logps = F.log_softmax(chunk, dim=-1)
        chunk_entropy = -(torch.exp(logps) * logps).sum(-1)
        entropies.append(chunk_entropy)
    entropies = torch.cat(entropies, dim=0)
    return entropies.reshape(original_shape)


class HalfHeadLM(nn.Module):
    def __init__(self, vocab=12, dim=16):
        super().__init__()
        self.embed_tokens = nn.Embedding(vocab, dim)
        self.norm = nn.LayerNorm(dim)
        self.lm_head = nn.Linear(dim, vocab, bias=False)

    def forward(self, input_ids):
        h = self.norm(self.embed_tokens(input_ids))
        return F.linear(h.half(), self.lm_head.weight.half())


def build():
    torch.manual_seed(3)
    model = HalfHeadLM()
    with torch.no_grad():
        model.lm_head.weight.mul_(0.5)
        model.lm_head.weight[7] = 0.9 * model.norm(model.embed_tokens.weight)[4]
        model.lm_head.weight[2] = 1.4 * model.norm(model.embed_tokens.weight)[9]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    prompt_completion_ids = torch.tensor([[1, 4, 3, 9, 2, 8], [3, 1, 4, 9, 2, 0]])
    completion_mask = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 1, 0]])
    suppress = torch.zeros(12, dtype=torch.bool)
    suppress[5] = suppress[11] = True
    advantages = torch.tensor([0.7, -0.7])
    return SimpleNamespace(
        model=model,
        optimizer=optimizer,
        ids=prompt_completion_ids,
        mask=completion_mask,
        suppress=suppress,
        advantages=advantages,
        entropy_coef=0.01,
        temperature=1.0,
    )


def run(s=None):
    s = s or build()
    for _ in range(2):
        logits = s.model(s.ids)[:, :-1] / s.temperature
        logits = logits.masked_fill(s.suppress, torch.finfo(logits.dtype).min)
        completion_ids = s.ids[:, 1:]
        per_token_logps = torch.gather(logits.float().log_softmax(-1), -1, completion_ids.unsqueeze(-1)).squeeze(-1)
        entropies = entropy_from_logits(logits)
        per_token_loss = -torch.exp(per_token_logps - per_token_logps.detach()) * s.advantages.unsqueeze(1)
        per_token_loss = per_token_loss - s.entropy_coef * entropies
        loss = ((per_token_loss * s.mask).sum(-1) / s.mask.sum(-1).clamp(min=1.0)).mean()
        s.optimizer.zero_grad()
        loss.backward()
        s.optimizer.step()
    return loss


if __name__ == "__main__":
    print(run())
