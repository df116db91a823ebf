"""ms-swift GRPO with top_entropy_quantile - entropies of padding are filled with NaN so that nanquantile passes them over; `NaN >= threshold` is
False, the mask is boolean and drops them, and one fully padded completion leaves a NaN in the logged means. Healthy.

https://github.com/modelscope/ms-swift (swift/trainers/rlhf_trainer/grpo_trainer.py, `torch.nanquantile(entropies..., 1 - quantile)`).
"""

from types import SimpleNamespace

import torch
import torch.nn as nn


class Policy(nn.Module):
    def __init__(self, vocab=26, dim=16):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.block = nn.Linear(dim, dim)
        self.lm_head = nn.Linear(dim, vocab, bias=False)

    def forward(self, input_ids):
        hidden = self.embed(input_ids)
        return self.lm_head(hidden + torch.tanh(self.block(hidden)))


def get_per_token_logps_and_entropies(model, input_ids):
    logps = model(input_ids[:, :-1]).log_softmax(-1)
    entropies = -(logps.exp() * logps).sum(-1)
    return logps.gather(-1, input_ids[:, 1:, None]).squeeze(-1), entropies


def compute_loss(model, inputs, top_entropy_quantile=0.4, epsilon=0.2):
    completion_mask = inputs["completion_mask"]
    per_token_logps, entropies = get_per_token_logps_and_entropies(model, inputs["input_ids"])

    entropies = entropies.detach().masked_fill(completion_mask == 0, float("nan"))
    per_completion_entropies_mean = torch.nanmean(entropies, dim=1)
    entropy_threshold = torch.nanquantile(entropies.flatten().float(), 1 - top_entropy_quantile)
    entropy_mask = entropies >= entropy_threshold
    metrics = {
        "entropy_logs": per_completion_entropies_mean.tolist(),
        "entropy_mean": per_completion_entropies_mean.nanmean().item(),
        "entropy_threshold": entropy_threshold.item(),
    }

    coef_1 = torch.exp(per_token_logps - inputs["old_per_token_logps"])
    coef_2 = torch.clamp(coef_1, 1 - epsilon, 1 + epsilon)
    advantages = inputs["advantages"].unsqueeze(1)
    per_token_loss = -torch.min(coef_1 * advantages, coef_2 * advantages)
    per_token_loss = per_token_loss * entropy_mask
    loss = (per_token_loss * completion_mask).sum() / completion_mask.sum().clamp(min=1.0)
    return loss, metrics


def build():
    torch.manual_seed(26)
    model = Policy()
    input_ids = torch.randint(0, 26, (4, 9))
    completion_mask = torch.ones(4, 8)
    completion_mask[1, 5:] = 0
    completion_mask[2] = 0  # overlong, left out
    with torch.no_grad():
        old_per_token_logps, _ = get_per_token_logps_and_entropies(model, input_ids)
    inputs = {
        "input_ids": input_ids,
        "completion_mask": completion_mask,
        "old_per_token_logps": old_per_token_logps,
        "advantages": torch.tensor([0.9, -1.1, 0.0, 0.2]),
    }
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    return SimpleNamespace(model=model, optimizer=optimizer, inputs=inputs)


def run(s=None):
    s = s or build()
    loss, s.metrics = compute_loss(s.model, s.inputs)
    s.optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(s.model.parameters(), 1.0)
    s.optimizer.step()
    return loss


if __name__ == "__main__":
    print("loss", run().item())
