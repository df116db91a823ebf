"""A new token fits into the padded vocabulary, the resize is skipped, and its embedding row stays memory that nobody wrote.
https://github.com/hiyouga/LlamaFactory/pull/10547
"""

from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F

from expected import Expected

EXPECTED = Expected(
    phase=("weights",),
    cause=("uninitialized", "poisoned_weights"),
    op=("uninitialized", "embedding"),
    index=(1, 4, 0),
    masked=None,
    role=("weights",),
    fix=("initialise_memory", "fix_upstream"),
    variable=("embed_tokens.weight",),
    line=("x = self.embed_tokens(input_ids)",),
)


class CausalLM(nn.Module):
    def __init__(self, vocab_size, dim=8):
        super().__init__()
        self.embed_tokens = nn.Embedding(vocab_size, dim)
        self.q_proj = nn.Linear(dim, dim, bias=False)
        self.lm_head = nn.Linear(dim, vocab_size, bias=False)

    def forward(self, input_ids):
        x = self.embed_tokens(input_ids)
        return self.lm_head(x + torch.tanh(self.q_proj(x)))


def pad_embedding(weight, multiple=8):
    rows = -(-weight.shape[0] // multiple) * multiple
    padded = torch.empty(rows, weight.shape[1], dtype=weight.dtype)
    padded[: weight.shape[0]] = weight
    return padded


def resize_embedding_layer(model, num_tokens):
    if num_tokens > model.embed_tokens.num_embeddings:
        raise NotImplementedError("grow the matrix and initialise the new rows")
    return model  # enough padded rows already


def build():
    torch.manual_seed(10547)
    torch.use_deterministic_algorithms(True)  # unwritten memory is filled with NaN
    tokenizer_size = 21
    base = CausalLM(tokenizer_size)
    model = CausalLM(24)
    with torch.no_grad():
        model.embed_tokens.weight.copy_(pad_embedding(base.embed_tokens.weight))
    model = resize_embedding_layer(model, tokenizer_size + 1)
    input_ids = torch.randint(0, tokenizer_size, (3, 7))
    input_ids[1, 4] = tokenizer_size  # <think>
    return SimpleNamespace(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=1e-2), batch={"input_ids": input_ids})


def run(s=None):
    s = s or build()
    ids = s.batch["input_ids"]
    loss = F.cross_entropy(s.model(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    s.optimizer.zero_grad()
    loss.backward()
    s.optimizer.step()
    return loss
