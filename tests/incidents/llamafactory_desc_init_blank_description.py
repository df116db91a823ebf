"""LLaMA-Factory desc_init: the embedding of a new special token starts as the mean of the embeddings of its description. One description
is blank, tokenizes to nothing, the mean over no rows is NaN and the new row of the embedding is NaN before the first step.

https://github.com/hiyouga/LlamaFactory (src/llamafactory/model/model_utils/embedding.py, _description_based_initialization; upstream falls
back to the mean of the existing rows when no valid token is left, here that branch is missing). Heals: that fallback, or a real description.
Tempting and useless: clipping the gradient, skipping the bad step (the weight is bad already, every step that sees the token is lost).
"""

from types import SimpleNamespace

import torch
import torch.nn as nn

from expected import Expected

EXPECTED = Expected(
    phase=("weights", "forward"),
    cause=("poisoned_weights", "empty_mask_mean", "zero_div_zero"),
    op=("any", "mean", "embedding"),
    index=None,
    masked=None,
    role=("weights", "hidden"),
    fix=("fix_upstream", "guard_empty", "initialise_memory"),
    variable=("embed_tokens.weight", "base_embedding"),
    line=("hidden = self.embed_tokens(input_ids)", "base_embedding = token_embeds.mean(dim=0)"),
)

WORDS = "<s> </s> the model calls a tool and reads what it said user asks".split()


class Tokenizer:
    def __init__(self):
        self.vocab = {word: i for i, word in enumerate(WORDS)}

    def __len__(self):
        return len(self.vocab)

    def add_special_tokens(self, tokens):
        for token in tokens:
            self.vocab[token] = len(self.vocab)

    def __call__(self, text):
        return torch.tensor([self.vocab[word] for word in text.split()], dtype=torch.long)


class CausalLM(nn.Module):
    def __init__(self, vocab, dim=16):
        super().__init__()
        self.embed_tokens = nn.Embedding(vocab, dim)
        self.layers = nn.Sequential(nn.Linear(dim, dim), nn.SiLU(), nn.Linear(dim, dim))
        self.lm_head = nn.Linear(dim, vocab, bias=False)

    def forward(self, input_ids):
        hidden = self.embed_tokens(input_ids)
        return self.lm_head(hidden + self.layers(hidden))


@torch.no_grad()
def resize_embedding_layer(model, tokenizer, descriptions):
    old_size, dim = model.embed_tokens.weight.shape
    embed_tokens = nn.Embedding(len(tokenizer), dim)
    embed_tokens.weight[:old_size] = model.embed_tokens.weight
    lm_head = nn.Linear(dim, len(tokenizer), bias=False)
    lm_head.weight[:old_size] = model.lm_head.weight
    for i, desc in enumerate(descriptions.values()):
        token_ids = tokenizer(desc)
        valid_token_ids = token_ids[token_ids < old_size]
        token_embeds = embed_tokens(valid_token_ids)
        base_embedding = token_embeds.mean(dim=0)
        embed_tokens.weight[old_size + i] = base_embedding
    model.embed_tokens, model.lm_head = embed_tokens, lm_head


def build():
    torch.manual_seed(5)
    tokenizer = Tokenizer()
    model = CausalLM(len(tokenizer))
    descriptions = {"<tool_call>": "the model calls a tool", "<tool_response>": "", "<user_turn>": "a user asks"}
    tokenizer.add_special_tokens(descriptions)
    resize_embedding_layer(model, tokenizer, descriptions)
    texts = ["<s> <user_turn> a user asks what it said </s>", "<s> <tool_call> a tool <tool_response> it said </s>"]
    input_ids = torch.stack([tokenizer(text)[:8] for text in texts])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    return SimpleNamespace(model=model, optimizer=optimizer, input_ids=input_ids)


def run(s=None):
    s = s or build()
    logits = s.model(s.input_ids[:, :-1])
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), s.input_ids[:, 1:].flatten())
    s.optimizer.zero_grad()
    loss.backward()
    s.optimizer.step()
    return loss


if __name__ == "__main__":
    print("loss", run().item())
