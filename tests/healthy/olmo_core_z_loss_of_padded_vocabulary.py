"""Cross entropy with z-loss over a vocabulary that is padded to a multiple of 8, the padded logits set to -inf. Healthy: logsumexp gives the
padded entries a weight of 0, no label points at them, and ignored positions are dropped with a mask over finite values. The perplexity of
a domain without tokens is NaN and is only logged.

https://github.com/allenai/OLMo-core/blob/main/src/olmo_core/nn/functional/cross_entropy_loss.py
"""

from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F


def cross_entropy_loss(logits, labels, ignore_index=-100, z_loss_multiplier=1e-4):
    logits = logits.float()
    loss = F.cross_entropy(logits, labels, ignore_index=ignore_index)
    z_squared = logits.logsumexp(-1).pow(2)
    mask = labels != ignore_index
    z_squared = (z_squared * mask).sum() / mask.sum()
    return loss, z_loss_multiplier * z_squared


def build():
    torch.manual_seed(50280)
    vocab, padded = 13, 16
    model = nn.Sequential(nn.Embedding(padded, 8), nn.LayerNorm(8), nn.Linear(8, padded, bias=False))
    pad_columns = torch.arange(padded) >= vocab
    ids = torch.randint(0, vocab, (3, 8))
    labels = ids.roll(-1, 1)
    labels[:, -1] = -100
    labels[0, :4] = -100
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
    return SimpleNamespace(
        model=model, optimizer=optimizer, ids=ids, labels=labels, pad_columns=pad_columns, domain=torch.tensor([0, 2, 0]), metrics={}
    )


def run(s=None):
    s = s or build()
    logits = s.model(s.ids).masked_fill(s.pad_columns, float("-inf"))
    ce_loss, z_loss = cross_entropy_loss(logits.flatten(0, 1), s.labels.flatten())
    loss = ce_loss + z_loss
    with torch.no_grad():
        token_loss = F.cross_entropy(logits.transpose(1, 2), s.labels, reduction="none")
        scored = s.labels != -100
        for name, index in (("web", 0), ("code", 1), ("books", 2)):
            chosen = scored & (s.domain == index).unsqueeze(1)
            s.metrics[f"ppl/{name}"] = torch.exp(token_loss[chosen].mean())
    s.optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(s.model.parameters(), 1.0)
    s.optimizer.step()
    return loss


if __name__ == "__main__":
    print(run())
