"""NVIDIA/FasterTransformer #221 - weight files written in float32 are read with the dtype float16.

The converter writes each weight as raw float32 bytes; the loader of the fine-tuning script reads them as float16 and takes the first
numel values. Shapes fit and nothing complains, but the low halves of the floats are arbitrary bit patterns, NaN among them: the loss of
the first step is NaN, the weight was bad before it.

Source: https://github.com/NVIDIA/FasterTransformer/issues/221 ("GPT model output nans log-likelihood when loading fp16 weights").
Heals: reading with the dtype of the file and casting afterwards. Does not heal: skipping steps (each one is bad), float32 arithmetic.
"""

from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F

from expected import Expected

EXPECTED = Expected(
    phase=("weights",),
    cause=("poisoned_weights",),
    op=("any",),
    index=None,
    masked=None,
    role=("weights",),
    fix=("fix_upstream", "validate_config"),
    variable=("lm_head.weight",),
    line=("logits = self.lm_head(self.ln_f(x))", "model.lm_head.weight.copy_(weight.float())", None),
)


class GPT(nn.Module):
    def __init__(self, vocab=16, dim=12):
        super().__init__()
        self.wte = nn.Embedding(vocab, dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 24), nn.GELU(), nn.Linear(24, dim))
        self.ln_f = nn.LayerNorm(dim)
        self.lm_head = nn.Linear(dim, vocab, bias=False)

    def forward(self, input_ids):
        x = self.wte(input_ids)
        x = x + self.mlp(x)
        logits = self.lm_head(self.ln_f(x))
        return logits


def write_bin(weight):
    """The bytes of model.lm_head.weight.bin as the converter writes them."""
    return weight.detach().contiguous().flatten().view(torch.uint8).clone()


def from_file(raw, shape, dtype):
    numel = shape[0] * shape[1]
    return raw.view(dtype)[:numel].reshape(shape)


@torch.no_grad()
def load_lm_head(model, raw, weights_data_type):
    weight = from_file(raw, model.lm_head.weight.shape, weights_data_type)
    model.lm_head.weight.copy_(weight.float())


def build(weights_data_type=torch.float16):
    torch.manual_seed(221)
    trained = GPT()
    raw = write_bin(trained.lm_head.weight)
    model = GPT()
    load_lm_head(model, raw, weights_data_type)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    return SimpleNamespace(model=model, optimizer=optimizer, input_ids=torch.randint(0, 16, (3, 9)))


def run(s=None):
    s = s or build()
    logits = s.model(s.input_ids[:, :-1])
    loss = F.cross_entropy(logits.flatten(0, 1), s.input_ids[:, 1:].flatten())
    s.optimizer.zero_grad()
    loss.backward()
    s.optimizer.step()
    return loss


if __name__ == "__main__":
    run()
