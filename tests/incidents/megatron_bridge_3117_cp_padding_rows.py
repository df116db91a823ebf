"""Context-parallel padding adds query rows that may attend to nothing; their softmax is NaN and loss_mask only multiplies it by zero.
https://github.com/NVIDIA-NeMo/Megatron-Bridge/pull/3117
"""

from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("fully_masked_softmax", "nan_times_zero_mask"),
    op=("_softmax",),
    index=(1, 0, 5, 0),
    masked=True,
    role=("attention",),
    fix=("safe_softmax", "finite_mask_fill"),
    variable=("probs",),
    line=("probs = scores.softmax(dim=-1)",),
)


class CoreAttention(nn.Module):
    def __init__(self, hidden=12, heads=2):
        super().__init__()
        self.heads, self.head_dim = heads, hidden // heads
        self.linear_qkv = nn.Linear(hidden, 3 * hidden, bias=False)
        self.linear_proj = nn.Linear(hidden, hidden, bias=False)

    def forward(self, x, attention_mask):
        b, t, h = x.shape
        q, k, v = (y.view(b, t, self.heads, self.head_dim).transpose(1, 2) for y in self.linear_qkv(x).split(h, dim=-1))
        scores = q @ k.transpose(-1, -2) / self.head_dim**0.5
        scores = scores.masked_fill(attention_mask, float("-inf"))
        probs = scores.softmax(dim=-1)
        return x + self.linear_proj((probs @ v).transpose(1, 2).reshape(b, t, h))


class GPTModel(nn.Module):
    def __init__(self, vocab=20, hidden=12, layers=1):
        super().__init__()
        self.word_embeddings = nn.Embedding(vocab, hidden)
        self.layers = nn.ModuleList(CoreAttention(hidden) for _ in range(layers))
        self.output_layer = nn.Linear(hidden, vocab, bias=False)

    def forward(self, tokens, attention_mask, labels):
        x = self.word_embeddings(tokens)
        for layer in self.layers:
            x = checkpoint(layer, x, attention_mask, use_reentrant=False)
        logits = self.output_layer(x)
        return F.cross_entropy(logits.transpose(1, 2), labels, reduction="none")


def masked_next_token_loss(loss_mask, output_tensor):
    losses = output_tensor.view(-1).float()
    loss_mask = loss_mask.view(-1).float()
    return torch.sum(losses * loss_mask), loss_mask.sum()


def build():
    torch.manual_seed(3117)
    model = GPTModel()
    seq_lens = torch.tensor([8, 5])
    tokens = torch.randint(0, 20, (2, 8))
    pos = torch.arange(8)
    valid = pos[None] < seq_lens[:, None]
    attention_mask = (pos[None, :] > pos[:, None])[None, None] | ~valid[:, None, None, :] | ~valid[:, None, :, None]
    batch = {"tokens": tokens, "attention_mask": attention_mask, "labels": tokens.roll(-1, 1), "loss_mask": valid.float()}
    return SimpleNamespace(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.01), batch=batch)


def run(s=None):
    s = s or build()
    b = s.batch
    output_tensor = s.model(b["tokens"], b["attention_mask"], b["labels"])
    loss_sum, total_tokens = masked_next_token_loss(b["loss_mask"], output_tensor)
    loss = loss_sum / total_tokens
    s.optimizer.zero_grad()
    loss.backward()
    s.optimizer.step()
    return loss
