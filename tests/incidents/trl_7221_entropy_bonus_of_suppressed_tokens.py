"""TRL GRPO, entropy bonus from entropy_from_logits on half-precision logits with suppressed tokens.

Suppressed tokens are filled with the lowest finite half; log_softmax subtracts the log-sum (some 20) and leaves the range of half: -inf for a token of probability 0,
and exp(logps) * logps is 0 * -inf. (Source: huggingface/trl, issue 7221 and pull requests 7224, 7252, trl/trainer/utils.py, entropy_from_logits.)
Heals: logits in float32 before the log_softmax; a fill that leaves room (-1e4); clamping logps at the lowest half; where(logps = -inf, 0, logps) before the product; Categorical.entropy; logsumexp - sum(p * logits).
Does not: nan_to_num on the product (loss finite, gradient NaN); torch.xlogy(p, p) (gradient NaN).
"""

from types import SimpleNamespace

import torch
from torch import nn
import torch.nn.functional as F

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("plogp_zero", "fp16_overflow"),
    op=("log_softmax",),
    index=(0, 5),
    masked=False,
    role=("log_probs", "entropy", "logits"),
    fix=("upcast_fp32", "clamp_input", "finite_mask_fill", "mask_before_op", "stable_function", "representable_eps"),
    variable=("logps",),
    line=("logps = F.log_softmax(chunk, dim=-1)",),
)

SUPPRESSED = [5, 17]


class Policy(nn.Module):
    def __init__(self, vocab=24, dim=16):
        super().__init__()
        self.embed_tokens = nn.Embedding(vocab, dim)
        self.mlp = nn.Sequential(nn.Linear(dim, dim), nn.SiLU(), nn.Linear(dim, dim))
        self.lm_head = nn.Linear(dim, vocab)

    def forward(self, input_ids):
        hidden = self.embed_tokens(input_ids)
        hidden = hidden + self.mlp(hidden)
        return self.lm_head(hidden).to(torch.float16)


def entropy_from_logits(logits, chunk_size=128):
    original_shape = logits.shape[:-1]
    num_classes = logits.shape[-1]
    flat_logits = logits.reshape(-1, num_classes)
    entropies = []
    for chunk in flat_logits.split(chunk_size, dim=0):
        logps = F.log_softmax(chunk, dim=-1)
        chunk_entropy = -(torch.exp(logps) * logps).sum(-1)
        entropies.append(chunk_entropy)
    return torch.cat(entropies, dim=0).reshape(original_shape)


def selective_log_softmax(logits, index):
    per_token_logps = []
    for row_logits, row_labels in zip(logits, index):
        row_logps = F.log_softmax(row_logits, dim=-1)
        per_token_logps.append(row_logps.gather(dim=-1, index=row_labels.unsqueeze(-1)).squeeze(-1))
    return torch.stack(per_token_logps)


def get_per_token_logps_and_entropies(model, input_ids, logits_to_keep, temperature=1.0):
    logits = model(input_ids)[:, :-1, :][:, -logits_to_keep:, :]
    logits = logits / temperature
    logits[..., SUPPRESSED] = torch.finfo(logits.dtype).min
    completion_ids = input_ids[:, -logits_to_keep:]
    return selective_log_softmax(logits, completion_ids).float(), entropy_from_logits(logits).float()


def build():
    torch.manual_seed(9)
    model = Policy()
    with torch.no_grad():
        model.lm_head.bias.fill_(21.0)
    allowed = torch.tensor([i for i in range(24) if i not in SUPPRESSED])
    input_ids = allowed[torch.randint(0, len(allowed), (4, 9))]
    completion_mask = torch.ones(4, 6)
    completion_mask[1, 4:] = 0
    with torch.no_grad():
        old, _ = get_per_token_logps_and_entropies(model, input_ids, 6)
    return SimpleNamespace(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3),
        inputs={
            "input_ids": input_ids,
            "completion_mask": completion_mask,
            "advantages": torch.tensor([1.0, -1.0, 0.5, -0.5]),
            "old_per_token_logps": old,
        },
        entropy_coef=0.01,
    )


def run(s=None):
    s = s or build()
    mask = s.inputs["completion_mask"]
    logps_new, entropies = get_per_token_logps_and_entropies(s.model, s.inputs["input_ids"], mask.shape[1])
    advantages = s.inputs["advantages"].unsqueeze(1)
    coef_1 = torch.exp(logps_new - s.inputs["old_per_token_logps"])
    coef_2 = torch.clamp(coef_1, 0.8, 1.2)
    per_token_loss = -torch.min(coef_1 * advantages, coef_2 * advantages)
    per_token_loss = per_token_loss - s.entropy_coef * entropies
    loss = (per_token_loss * mask).sum() / mask.sum().clamp(min=1.0)
    s.optimizer.zero_grad()
    loss.backward()
    s.optimizer.step()
    return loss


if __name__ == "__main__":
    print(run())
