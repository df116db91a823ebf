"""Value head on packed hidden states that are padded back into a buffer of torch.empty (flash-attn's bert_padding, pad_input).  Healthy.

The rows of padding are never written; torch's deterministic mode fills them with NaN, elsewhere they hold whatever was there. The value head and the loss read only the
written rows, chosen by index before any arithmetic, so neither a value nor a gradient of the unwritten ones is ever multiplied.
Source: https://github.com/Dao-AILab/flash-attention/blob/main/flash_attn/bert_padding.py (pad_input / index_put_first_axis)
"""

from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F


def unpad_input(x, attention_mask):
    indices = attention_mask.flatten().nonzero().flatten()
    return x.flatten(0, 1)[indices], indices


def pad_input(values, indices, batch, seqlen):
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    out = torch.empty(batch * seqlen, values.shape[-1])
    torch.use_deterministic_algorithms(before)
    out[indices] = values
    return out.view(batch, seqlen, -1)


class Critic(nn.Module):
    def __init__(self, vocab=30, dim=16):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.body = nn.Sequential(nn.RMSNorm(dim), nn.Linear(dim, dim), nn.SiLU())
        self.v_head = nn.Linear(dim, 1)

    def forward(self, ids, attention_mask):
        packed, indices = unpad_input(self.embed(ids), attention_mask)
        return pad_input(self.body(packed), indices, *ids.shape)


def build():
    torch.manual_seed(13)
    model = Critic()
    attention_mask = torch.ones(3, 8, dtype=torch.long)
    attention_mask[0, 5:] = 0
    attention_mask[2, 2:] = 0
    batch = {"input_ids": torch.randint(0, 30, (3, 8)), "attention_mask": attention_mask, "returns": torch.randn(3, 8)}
    return SimpleNamespace(model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3), batch=batch)


def run(s=None):
    s = s or build()
    keep = s.batch["attention_mask"].bool()
    for _ in range(3):
        hidden = s.model(s.batch["input_ids"], s.batch["attention_mask"])
        values = s.model.v_head(hidden[keep]).squeeze(-1)
        loss = F.mse_loss(values, s.batch["returns"][keep])
        s.optimizer.zero_grad()
        loss.backward()
        s.optimizer.step()
    return loss.item()


if __name__ == "__main__":
    print(run())
