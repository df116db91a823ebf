"""Asynchronous RL with ratio_type="sequence": the importance ratio is the exponential of the summed log ratios of an answer.

The sampler's log-probs are systematically lower (its temperature was left at 2.0), about 0.4 per token. For the short answers
the product is large but finite; for the one with 320 tokens the sum is beyond 89 and the ratio is inf, so are loss and gradients.
Source: https://github.com/PrimeIntellect-ai/prime-rl/pull/1329
Heals: clamping the summed log ratio before exp; log-probs at the temperature of the trainer.
Does not: fp64 rewards; dividing by loss_scale; clipping the gradient norm (inf / inf).
"""

from types import SimpleNamespace

import torch
from torch import nn

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("seq_ratio_overflow", "exp_overflow"),
    op=("exp",),
    index=(),
    masked=None,
    role=("ratio", "is_weight"),
    fix=("clamp_exponent", "fix_upstream", "drop_invalid_sample", "validate_config"),
    variable=("importance_ratio",),
    line=("importance_ratio = torch.exp(log_importance_ratio)",),
)


class Policy(nn.Module):
    def __init__(self, vocab=48, dim=16):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.norm = nn.LayerNorm(dim)
        self.lm_head = nn.Linear(dim, vocab, bias=False)

    def forward(self, input_ids):
        return self.lm_head(self.norm(self.embed(input_ids)))


def selective_log_softmax(logits, index):
    return torch.log_softmax(logits, dim=-1).gather(-1, index.unsqueeze(-1)).squeeze(-1)


def compute_loss(trainer_logprobs, inference_logprobs, advantages, loss_mask, ratio_type, loss_scale):
    total_loss = 0.0
    for new, old, adv, mask in zip(trainer_logprobs, inference_logprobs, advantages, loss_mask, strict=True):
        log_importance_ratio = new - old
        if ratio_type == "sequence":
            log_importance_ratio = (log_importance_ratio * mask).sum()
        importance_ratio = torch.exp(log_importance_ratio)
        total_loss = total_loss - (importance_ratio * adv).expand_as(new)[mask.bool()].sum()
    return total_loss / loss_scale


def build(inference_temperature=2.0):
    torch.manual_seed(41)
    model = Policy()
    with torch.no_grad():
        model.lm_head.weight *= 9.0
    lengths = (18, 40, 326, 25)
    sequences, inference_logprobs, loss_mask = [], [], []
    with torch.no_grad():
        for n in lengths:
            ids = torch.randint(0, 48, (1,))
            for _ in range(n):  # the answers are greedy enough to be likely under both
                logits = model(ids[-1:])[0]
                ids = torch.cat([ids, torch.multinomial((logits / 0.7).softmax(-1), 1)])
            sequences.append(ids)
            inference_logprobs.append(selective_log_softmax(model(ids[:-1]) / inference_temperature, ids[1:]))
            mask = torch.ones(n)
            mask[:6] = 0
            loss_mask.append(mask)
    batch = dict(sequences=sequences, inference_logprobs=inference_logprobs, loss_mask=loss_mask, advantages=[0.5, -0.5, 0.9, -0.9])
    return SimpleNamespace(model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-5), batch=batch)


def run(s=None, ratio_type="sequence"):
    s = s or build()
    b = s.batch
    for _ in range(2):
        trainer_logprobs = [selective_log_softmax(s.model(ids[:-1]), ids[1:]) for ids in b["sequences"]]
        loss_scale = sum(m.sum() for m in b["loss_mask"])
        loss = compute_loss(trainer_logprobs, b["inference_logprobs"], b["advantages"], b["loss_mask"], ratio_type, loss_scale)
        s.optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(s.model.parameters(), 1.0)
        s.optimizer.step()
    return loss.item(), s.model.lm_head.weight.isfinite().all().item()


if __name__ == "__main__":
    print(run())
