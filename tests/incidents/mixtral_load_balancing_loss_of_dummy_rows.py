"""Mixtral's load balancing loss on a micro-batch of dummy rows: the attention mask sums to 0, tokens per expert is 0/0.

The sampler fills the last micro-batch of an accumulation window with padding rows (attention_mask 0, labels -100) so that every rank takes
the same number of steps.  The language model loss is a sum over no token and fine; the router's auxiliary loss averages over attention_mask
and divides 0 by 0.

Source: `load_balancing_loss_func` with attention_mask of
https://github.com/huggingface/transformers/blob/main/src/transformers/models/mixtral/modeling_mixtral.py (added by
https://github.com/huggingface/transformers/pull/28517); planted: a micro-batch of padding only.
Heals: clamp the count, or no auxiliary loss without tokens.  Tempting and no help: a smaller router_aux_loss_coef, clipping the gradient.
"""

from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("empty_mask_mean", "zero_div_zero"),
    op=("div",),
    index=(0, 0),
    masked=None,
    role=("router", "loss"),
    fix=("guard_empty", "clamp_denominator", "drop_invalid_sample", "clamp_input", "representable_eps"),
    variable=("tokens_per_expert",),
    line=("tokens_per_expert = (expert_mask * mask[:, None, None]).sum(dim=0) / mask.sum()",),
)


def load_balancing_loss(router_logits, num_experts, top_k, attention_mask):
    routing_weights = router_logits.softmax(dim=-1)
    _, selected_experts = routing_weights.topk(top_k, dim=-1)
    expert_mask = F.one_hot(selected_experts, num_experts).to(routing_weights.dtype)
    mask = attention_mask.reshape(-1).to(routing_weights.dtype)
    tokens_per_expert = (expert_mask * mask[:, None, None]).sum(dim=0) / mask.sum()
    router_prob_per_expert = (routing_weights * mask[:, None]).sum(dim=0) / mask.sum()
    return (tokens_per_expert * router_prob_per_expert.unsqueeze(0)).sum() * num_experts


class SparseMoeBlock(nn.Module):
    def __init__(self, dim=12, num_experts=4, top_k=2):
        super().__init__()
        self.top_k = top_k
        self.gate = nn.Linear(dim, num_experts, bias=False)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(dim, 2 * dim), nn.SiLU(), nn.Linear(2 * dim, dim)) for _ in range(num_experts))

    def forward(self, hidden_states):
        router_logits = self.gate(hidden_states)
        weights, selected = router_logits.softmax(dim=-1).topk(self.top_k, dim=-1)
        weights = weights / weights.sum(dim=-1, keepdim=True)
        outputs = torch.stack([expert(hidden_states) for expert in self.experts], dim=-2)
        picked = outputs.gather(-2, selected.unsqueeze(-1).expand(*selected.shape, hidden_states.shape[-1]))
        return (picked * weights.unsqueeze(-1)).sum(dim=-2), router_logits


class TinyMixtral(nn.Module):
    def __init__(self, vocab=30, dim=12):
        super().__init__()
        self.embed_tokens = nn.Embedding(vocab, dim)
        self.norm = nn.LayerNorm(dim)
        self.moe = SparseMoeBlock(dim)
        self.lm_head = nn.Linear(dim, vocab, bias=False)

    def forward(self, input_ids):
        h = self.embed_tokens(input_ids)
        out, router_logits = self.moe(self.norm(h))
        return self.lm_head(h + out), router_logits.reshape(-1, router_logits.shape[-1])


def build():
    torch.manual_seed(28517)
    model = TinyMixtral()
    micro_batches = []
    for lengths in ((7, 5), (0, 0)):
        attention_mask = (torch.arange(7)[None] < torch.tensor(lengths)[:, None]).long()
        input_ids = torch.randint(1, 30, (2, 7)) * attention_mask
        labels = input_ids.masked_fill(attention_mask == 0, -100)
        micro_batches.append(dict(input_ids=input_ids, attention_mask=attention_mask, labels=labels))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return SimpleNamespace(model=model, optimizer=optimizer, micro_batches=micro_batches, router_aux_loss_coef=0.02)


def run(s=None):
    s = s or build()
    num_items = sum((mb["labels"][:, 1:] != -100).sum() for mb in s.micro_batches)
    total = 0.0
    for mb in s.micro_batches:
        logits, router_logits = s.model(mb["input_ids"])
        lm_loss = (
            F.cross_entropy(logits[:, :-1].flatten(0, 1), mb["labels"][:, 1:].flatten(), ignore_index=-100, reduction="sum") / num_items
        )
        aux_loss = load_balancing_loss(router_logits, 4, 2, mb["attention_mask"])
        loss = lm_loss + s.router_aux_loss_coef * aux_loss / len(s.micro_batches)
        loss.backward()
        total = total + loss.detach()
    nn.utils.clip_grad_norm_(s.model.parameters(), 1.0)
    s.optimizer.step()
    s.optimizer.zero_grad()
    return total


if __name__ == "__main__":
    run()
