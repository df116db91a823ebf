"""RLHF actor step with a model whose vocabulary was resized for new special tokens (multiple of 8, as DeepSpeed-Chat does).

The input embedding gets fresh normal rows; the output head is made by torch.empty and only its old rows are copied. The new rows keep whatever the
memory held - here NaN, since the run was started with deterministic algorithms, which fill uninitialised memory. No new token is in the batch, yet
log_softmax runs over the whole vocabulary: all log-probs, the actor loss and the gradients are NaN.

Source: https://github.com/deepspeedai/DeepSpeedExamples/issues/922 (actor loss and log-probs are nan only with resized embeddings).
Heals: an initialisation of the new rows (zeros, mean of the old rows).  Does not: clipping log-probs or ratios, fp32, dropping samples.
"""

from types import SimpleNamespace

import torch
import torch.nn as nn

from expected import Expected

EXPECTED = Expected(
    phase=("weights",),
    cause=("uninitialized", "poisoned_weights"),
    op=("linear", "empty", "copy_", "mm"),
    index=(20, 0),
    masked=None,
    role=("weights",),
    fix=("initialise_memory", "fix_upstream"),
    variable=("lm_head.weight",),
    line=("return self.lm_head(h)", "new_head.weight = nn.Parameter(torch.empty(num_tokens, old_head.weight.shape[1]))"),
)


class Actor(nn.Module):
    def __init__(self, vocab=20, dim=12):
        super().__init__()
        self.wte = nn.Embedding(vocab, dim)
        self.h = nn.Linear(dim, dim)
        self.lm_head = nn.Linear(dim, vocab, bias=False)

    def forward(self, ids):
        h = torch.tanh(self.h(self.wte(ids)))
        return self.lm_head(h)


def resize_token_embeddings(model, num_tokens):
    old_emb, old_head = model.wte, model.lm_head
    new_emb = nn.Embedding(num_tokens, old_emb.weight.shape[1])
    new_emb.weight.data[: old_emb.num_embeddings] = old_emb.weight.data
    new_head = nn.Linear(1, 1, bias=False)
    new_head.weight = nn.Parameter(torch.empty(num_tokens, old_head.weight.shape[1]))
    new_head.weight.data[: old_head.weight.shape[0]] = old_head.weight.data
    model.wte, model.lm_head = new_emb, new_head
    return model


def gather_log_probs(logits, labels):
    return torch.log_softmax(logits, dim=-1).gather(-1, labels.unsqueeze(-1)).squeeze(-1)


def actor_loss_fn(logprobs, old_logprobs, advantages, mask, cliprange=0.2):
    log_ratio = (logprobs - old_logprobs) * mask
    ratio = torch.exp(log_ratio)
    pg_loss1 = -advantages * ratio
    pg_loss2 = -advantages * torch.clamp(ratio, 1.0 - cliprange, 1.0 + cliprange)
    return torch.sum(torch.max(pg_loss1, pg_loss2) * mask) / mask.sum()


def build():
    torch.manual_seed(922)
    sft = Actor()
    input_ids = torch.randint(0, 20, (3, 8))
    with torch.no_grad():
        old_logprobs = gather_log_probs(sft(input_ids)[:, :-1], input_ids[:, 1:])
    torch.use_deterministic_algorithms(True)
    actor = resize_token_embeddings(sft, 24)
    torch.use_deterministic_algorithms(False)
    mask = torch.ones(3, 7)
    mask[:, :2] = 0
    mask[2, 5:] = 0
    batch = dict(input_ids=input_ids, old_logprobs=old_logprobs, advantages=torch.randn(3, 7), mask=mask)
    return SimpleNamespace(model=actor, optimizer=torch.optim.AdamW(actor.parameters(), lr=1e-4), batch=batch)


def run(s=None):
    s = s or build()
    b = s.batch
    logits = s.model(b["input_ids"])
    logprobs = gather_log_probs(logits[:, :-1], b["input_ids"][:, 1:])
    loss = actor_loss_fn(logprobs, b["old_logprobs"], b["advantages"], b["mask"])
    s.optimizer.zero_grad()
    loss.backward()
    s.optimizer.step()
    return loss.item()


if __name__ == "__main__":
    print(run())
