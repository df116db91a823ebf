"""Full fine-tune with model.half() and torch's AdamW at its default eps.

Parameters, moments and eps are all float16.  1e-8 rounds to 0 there, and so do the squares of ordinary gradients times 1 - beta2: the denominator is
exactly 0.  Rows of the embedding that the batch does not touch give 0/0, the others x/0.  Loss and gradients of the first step are fine, the second
forward is NaN.

Source: https://github.com/NVIDIA/apex/issues/240 (opt_level O3), https://github.com/afiaka87/glide-finetune/pull/6
Heals: eps=1e-4 (any eps that float16 can hold), float32 master weights and moments.
Does not: clipping, a smaller lr, warmup, loss scaling.
"""

from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F

from expected import Expected

EXPECTED = Expected(
    phase=("optimizer",),
    cause=("eps_underflow", "zero_div_zero", "zero_denominator"),
    op=("addcdiv_", "addcdiv", "div", "AdamW"),
    index=(0, 0),
    masked=None,
    role=("optimizer", "weights"),
    fix=("representable_eps", "upcast_fp32", "clamp_denominator"),
    variable=("embed_tokens.weight", None),
    line=("optimizer.step()",),
)

VOCAB, HIDDEN = 40, 16


class CausalLM(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed_tokens = nn.Embedding(VOCAB, HIDDEN, padding_idx=0)
        self.up_proj = nn.Linear(HIDDEN, 2 * HIDDEN)
        self.down_proj = nn.Linear(2 * HIDDEN, HIDDEN)
        self.lm_head = nn.Linear(HIDDEN, VOCAB, bias=False)

    def forward(self, input_ids):
        hidden = self.embed_tokens(input_ids)
        hidden = hidden + self.down_proj(F.silu(self.up_proj(hidden)))
        return self.lm_head(hidden).float()


def build():
    torch.manual_seed(240)
    model = CausalLM().half()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-5, betas=(0.9, 0.999), weight_decay=0.01)
    input_ids = torch.randint(3, VOCAB, (4, 10))
    return SimpleNamespace(model=model, optimizer=optimizer, batch=dict(input_ids=input_ids))


def run(s=None):
    s = s or build()
    optimizer = s.optimizer
    for _ in range(2):
        optimizer.zero_grad()
        logits = s.model(s.batch["input_ids"])
        loss = F.cross_entropy(logits[:, :-1].reshape(-1, VOCAB), s.batch["input_ids"][:, 1:].reshape(-1))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(s.model.parameters(), 1.0)
        optimizer.step()
    return loss


if __name__ == "__main__":
    print(run())
