"""AlpacaFarm, src/alpaca_farm/utils.py, stable_resize_token_embeddings
(https://github.com/tatsu-lab/alpaca_farm/blob/main/src/alpaca_farm/utils.py): new rows of the embedding are set to the mean of the old ones,
[:-num_new_tokens]. The `if num_new_tokens > 0` was lost; the checkpoint already has the pad token, num_new_tokens is 0, so [:-0] is empty, its
mean is NaN, and [-0:] writes it over the whole embedding before training starts.

Heals: no resize when nothing is new (or the checkpoint's embedding loaded again). Does not heal: skipping bad steps or nan_to_num on the
scores, every forward reads the same NaN.
"""

from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F

from expected import Expected

EXPECTED = Expected(
    phase=("weights",),
    cause=("poisoned_weights", "empty_mask_mean"),
    op=("any", "embedding", "mean"),
    index=None,
    masked=None,
    role=("weights",),
    fix=("fix_upstream", "guard_empty", "initialise_memory"),
    variable=("backbone.embed_tokens.weight",),
    line=("hidden = self.embed_tokens(input_ids)",),
)


class Backbone(nn.Module):
    def __init__(self, vocab, dim=12):
        super().__init__()
        self.embed_tokens = nn.Embedding(vocab, dim)
        self.layers = nn.ModuleList(nn.Linear(dim, dim) for _ in range(2))
        self.norm = nn.LayerNorm(dim)

    def forward(self, input_ids):
        hidden = self.embed_tokens(input_ids)
        for layer in self.layers:
            hidden = hidden + F.silu(layer(hidden))
        return self.norm(hidden)

    def resize_token_embeddings(self, target_size):
        old = self.embed_tokens
        if target_size == old.num_embeddings:
            return old
        self.embed_tokens = nn.Embedding(target_size, old.embedding_dim)
        self.embed_tokens.weight.data[: old.num_embeddings] = old.weight.data
        return self.embed_tokens


class RewardModel(nn.Module):
    def __init__(self, vocab=30):
        super().__init__()
        self.backbone = Backbone(vocab)
        self.reward_head = nn.Linear(12, 1)

    def forward(self, input_ids, attention_mask):
        last = attention_mask.sum(-1) - 1
        hidden = self.backbone(input_ids)
        return self.reward_head(hidden[torch.arange(len(input_ids)), last]).squeeze(-1)


def stable_resize_token_embeddings(model, target_size):
    num_new_tokens = target_size - model.embed_tokens.weight.size(0)
    model.resize_token_embeddings(target_size)
    embeddings_data = model.embed_tokens.weight.data
    embeddings_avg = embeddings_data[:-num_new_tokens].mean(dim=0, keepdim=True)
    embeddings_data[-num_new_tokens:] = embeddings_avg


def build():
    torch.manual_seed(64)
    model = RewardModel()
    tokenizer_size = 30
    stable_resize_token_embeddings(model.backbone, tokenizer_size)
    pairs = torch.randint(0, 29, (4, 2, 7))
    attention_mask = torch.ones(4, 2, 7, dtype=torch.long)
    attention_mask[2, 0, 5:] = 0
    attention_mask[3, 1, 4:] = 0
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-6)
    return SimpleNamespace(model=model, optimizer=optimizer, pairs=pairs, attention_mask=attention_mask)


def run(s=None):
    s = s or build()
    rewards = s.model(s.pairs.flatten(0, 1), s.attention_mask.flatten(0, 1)).view(4, 2)
    loss = F.binary_cross_entropy_with_logits(rewards[:, 1] - rewards[:, 0], torch.ones(4))
    s.optimizer.zero_grad()
    loss.backward()
    s.optimizer.step()
    return loss


if __name__ == "__main__":
    print(run().item())
