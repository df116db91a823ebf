"""Paddle #17677 - a zero-initialised EMA of the weights is applied with bias correction 1 - decay ** step before its first update.

The trainer saves the EMA weights right at step 0 (save_on_start): shadow / (1 - decay ** 0) is 0 / 0, and the checkpoint holds NaN for
every weight that the EMA tracks. The next run starts from that checkpoint: its weights are NaN before the first batch.
Source: https://github.com/PaddlePaddle/Paddle/pull/17677 (ExponentialMovingAverage, EMA_t / (1 - decay ** t),
EMA_0 = 0), re-expressed without a guard for t = 0.
Heals: no bias correction before the first update (save the raw weights), or refusing a checkpoint that is not finite. Does not: skipping
non-finite steps (every step is skipped, the weights stay NaN), nor a floor under the correction (finite, but every weight is 0 and stays dead).
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
    fix=("fix_upstream", "reject_input", "guard_empty"),
    variable=("encoder.weight",),
    line=("h = self.encoder(ids)",),
)


class ExponentialMovingAverage:
    def __init__(self, model, decay=0.999):
        self.decay = decay
        self.global_steps = 0
        self.shadow = {name: torch.zeros_like(p) for name, p in model.named_parameters() if p.requires_grad}

    @torch.no_grad()
    def update(self, model):
        self.global_steps += 1
        for name, p in model.named_parameters():
            if name in self.shadow:
                self.shadow[name].mul_(self.decay).add_(p, alpha=1.0 - self.decay)

    def state_dict(self):
        bias_correction = 1.0 - self.decay**self.global_steps
        return {name: value / bias_correction for name, value in self.shadow.items()}


class Policy(nn.Module):
    def __init__(self, vocab=20, dim=12):
        super().__init__()
        self.encoder = nn.Embedding(vocab, dim)
        self.norm = nn.LayerNorm(dim)
        self.fc = nn.Linear(dim, dim)
        self.decoder = nn.Linear(dim, vocab)

    def forward(self, ids):
        h = self.encoder(ids)
        h = h + torch.relu(self.fc(self.norm(h)))
        return self.decoder(h)


def save_checkpoint(ema):
    return {"model": ema.state_dict(), "global_steps": ema.global_steps}


def build():
    torch.manual_seed(17)
    first_run = Policy()
    ema = ExponentialMovingAverage(first_run)
    checkpoint = save_checkpoint(ema)  # save_on_start

    model = Policy()
    model.load_state_dict(checkpoint["model"])
    ids = torch.randint(0, 20, (4, 7))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-5)
    return SimpleNamespace(model=model, optimizer=optimizer, ids=ids)


def run(s=None):
    s = s or build()
    logits = s.model(s.ids[:, :-1])
    loss = F.cross_entropy(logits.flatten(0, 1), s.ids[:, 1:].flatten())
    s.optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(s.model.parameters(), 1.0)
    s.optimizer.step()
    return loss
