"""DPO fine-tuning of a model that was loaded with torch_dtype=float16 and is stepped by plain AdamW.

Loss (0.69) and gradients of the first step are fine. AdamW keeps its moments in the dtype of the weights: the squares of small gradients underflow to 0
and eps = 1e-8 is not representable in float16 either, so the update is 0/0 (rows of the embedding that no token touched) or m/0. From the second
step on every logit is NaN, which the notebook shows as a loss of 0.

Source: https://github.com/huggingface/smol-course/issues/61 (training loss is zero from the second step; float32 weights cure it).
Heals: float32 master weights, eps = 1e-4 .  Does not: gradient clipping, a lower learning rate, skipping steps with a NaN loss or gradient.
"""

from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F

from expected import Expected

EXPECTED = Expected(
    phase=("optimizer",),
    cause=("eps_underflow", "zero_div_zero"),
    op=("addcdiv_", "addcdiv", "div"),
    index=(0, 0),
    masked=None,
    role=("optimizer", "weights"),
    fix=("representable_eps", "upcast_fp32", "clamp_denominator"),
    variable=("embed.weight", None),
    line=("s.optimizer.step()",),
)


class TinyLM(nn.Module):
    def __init__(self, vocab=48, dim=16):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.up = nn.Linear(dim, 2 * dim)
        self.down = nn.Linear(2 * dim, dim)
        self.lm_head = nn.Linear(dim, vocab, bias=False)

    def forward(self, ids):
        h = self.embed(ids)
        h = h + self.down(F.gelu(self.up(h)))
        return self.lm_head(h)


def sequence_logps(logits, labels):
    logits = logits[:, :-1].float()
    labels = labels[:, 1:]
    return torch.gather(logits.log_softmax(-1), 2, labels.unsqueeze(2)).squeeze(2).sum(-1)


def build():
    torch.manual_seed(61)
    model = TinyLM().half()
    ref = TinyLM().half()
    ref.load_state_dict(model.state_dict())
    chosen = torch.randint(4, 48, (2, 9))
    rejected = torch.randint(4, 48, (2, 9))
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-5)
    return SimpleNamespace(model=model, ref=ref.requires_grad_(False), optimizer=optimizer, batch=dict(chosen=chosen, rejected=rejected))


def dpo_loss(model, ref, batch, beta=0.1):
    chosen, rejected = batch["chosen"], batch["rejected"]
    policy_logratios = sequence_logps(model(chosen), chosen) - sequence_logps(model(rejected), rejected)
    with torch.no_grad():
        ref_logratios = sequence_logps(ref(chosen), chosen) - sequence_logps(ref(rejected), rejected)
    return -F.logsigmoid(beta * (policy_logratios - ref_logratios)).mean()


def run(s=None):
    s = s or build()
    losses = []
    for _ in range(2):
        loss = dpo_loss(s.model, s.ref, s.batch)
        s.optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(s.model.parameters(), 1.0)
        s.optimizer.step()
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    print(run())
