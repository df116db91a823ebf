"""Grammar-constrained tool-call tokens carry -inf logits, and the entropy bonus multiplies their zero probability by -inf."""

from types import SimpleNamespace

import torch
import torch.nn as nn

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("plogp_zero",),
    op=("mul",),
    index=(3, 2),
    masked=False,
    role=("entropy",),
    fix=("stable_function", "finite_mask_fill"),
    variable=(None,),
    line=("entropy = lse - torch.sum(probs * logits, dim=-1)",),
)


def _gather_logprobs_entropy(logits, labels, temperature=1.0):
    logits = logits.float() / temperature
    lse = torch.logsumexp(logits, dim=-1)
    logprobs_labels = logits.gather(-1, labels.unsqueeze(-1)).squeeze(-1) - lse
    probs = torch.exp(logits - lse.unsqueeze(-1))
    entropy = lse - torch.sum(probs * logits, dim=-1)
    return logprobs_labels, entropy


def gather_logprobs_entropy(logits, labels, temperature=1.0, chunk_size=6):
    log_probs_list, entropy_list = [], []
    for i in range(0, logits.shape[0], chunk_size):
        chunk_log_probs, chunk_entropy = _gather_logprobs_entropy(logits[i : i + chunk_size], labels[i : i + chunk_size], temperature)
        log_probs_list.append(chunk_log_probs)
        entropy_list.append(chunk_entropy)
    return torch.cat(log_probs_list), torch.cat(entropy_list)


def ppo_actor_loss_fn(logprobs, old_logprobs, advantages, eps_clip, loss_mask):
    loss_mask_count = loss_mask.count_nonzero() or 1
    ratio = torch.where(loss_mask, torch.exp(logprobs - old_logprobs), 0)
    clipped_ratio = torch.clamp(ratio, 1.0 - eps_clip, 1.0 + eps_clip)
    pg_loss = torch.max(-advantages * ratio, -advantages * clipped_ratio)
    return torch.where(loss_mask, pg_loss, 0).sum() / loss_mask_count


def build():
    torch.manual_seed(108)
    model = nn.Sequential(nn.Embedding(15, 9), nn.Linear(9, 15))
    input_ids = torch.randint(0, 15, (17,))
    labels = torch.randint(0, 15, (17,))
    allowed = torch.ones(17, 15, dtype=torch.bool)
    allowed[9:12] = False
    allowed[9:12, :2] = True
    allowed[10, 7:9] = True
    labels[9:12] = torch.tensor([1, 8, 0])
    loss_mask = torch.ones(17, dtype=torch.bool)
    loss_mask[:4] = False
    old_logprobs = -2.5 - 0.1 * torch.rand(17)
    old_logprobs[9:12] = -0.7
    batch = {
        "input_ids": input_ids,
        "labels": labels,
        "allowed": allowed,
        "loss_mask": loss_mask,
        "old_logprobs": old_logprobs,
        "advantages": torch.randn(17),
    }
    return SimpleNamespace(model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-4), batch=batch)


def run(s=None):
    s = s or build()
    b = s.batch
    logits = s.model(b["input_ids"]).masked_fill(~b["allowed"], float("-inf"))
    logprobs, entropy = gather_logprobs_entropy(logits, b["labels"], temperature=0.9)
    loss = ppo_actor_loss_fn(logprobs, b["old_logprobs"], b["advantages"], 0.2, b["loss_mask"])
    loss = loss - 0.001 * torch.where(b["loss_mask"], entropy, 0).sum() / b["loss_mask"].sum()
    s.optimizer.zero_grad()
    loss.backward()
    s.optimizer.step()
    return loss
