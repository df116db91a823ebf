"""A reward model is loaded from a base checkpoint that has no score head. Modules are made without initialisation to save time, the head is missing
from the state dict, and no one initialises it: it holds whatever the allocator left (here NaN, as torch.use_deterministic_algorithms fills it).

Source: https://github.com/huggingface/transformers/issues/46002 (NaNs in classification heads of AutoModelForSequenceClassification).
Heals: initialising the missing keys after the load (or loading a checkpoint that has them). A lower learning rate or gradient clipping does not.
"""

from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F

from expected import Expected

EXPECTED = Expected(
    phase=("weights",),
    cause=("uninitialized", "poisoned_weights"),
    op=("weights", "uninitialized", "empty_like", "empty", "linear", "mm", "matmul"),
    index=None,
    masked=None,
    role=("weights",),
    fix=("initialise_memory", "fix_upstream"),
    variable=("score.weight",),
    line=("return self.score(pooled).squeeze(-1)", "self.score = nn.utils.skip_init(nn.Linear, dim, 1, bias=False)"),
)


class Backbone(nn.Module):
    def __init__(self, vocab=24, dim=8):
        super().__init__()
        self.embeddings = nn.Embedding(vocab, dim)
        self.dense = nn.Linear(dim, dim)
        self.norm = nn.LayerNorm(dim)

    def forward(self, input_ids):
        hidden = self.embeddings(input_ids)
        return self.norm(hidden + F.gelu(self.dense(hidden)))


class RewardModel(nn.Module):
    def __init__(self, vocab=24, dim=8):
        super().__init__()
        self.model = Backbone(vocab, dim)
        self.score = nn.utils.skip_init(nn.Linear, dim, 1, bias=False)

    def forward(self, input_ids, attention_mask):
        hidden = self.model(input_ids)
        last = attention_mask.sum(-1) - 1
        pooled = hidden[torch.arange(len(input_ids)), last]
        return self.score(pooled).squeeze(-1)


def from_pretrained(state_dict):
    model = RewardModel()
    result = model.load_state_dict(state_dict, strict=False)
    assert not result.unexpected_keys
    return model


def build():
    torch.manual_seed(46002)
    torch.use_deterministic_algorithms(True)
    checkpoint = {"model." + name: value for name, value in Backbone().state_dict().items()}
    model = from_pretrained(checkpoint)
    chosen = torch.randint(0, 24, (4, 9))
    rejected = torch.randint(0, 24, (4, 9))
    chosen_mask = (torch.arange(9) < torch.tensor([9, 6, 7, 8])[:, None]).long()
    rejected_mask = (torch.arange(9) < torch.tensor([5, 9, 8, 4])[:, None]).long()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-6)
    return SimpleNamespace(
        model=model, optimizer=optimizer, chosen=chosen, rejected=rejected, chosen_mask=chosen_mask, rejected_mask=rejected_mask
    )


def run(s=None):
    s = s or build()
    chosen_rewards = s.model(s.chosen, s.chosen_mask)
    rejected_rewards = s.model(s.rejected, s.rejected_mask)
    loss = -F.logsigmoid(chosen_rewards - rejected_rewards).mean()
    s.optimizer.zero_grad()
    loss.backward()
    s.optimizer.step()
    return loss


if __name__ == "__main__":
    print("loss", run().item())
