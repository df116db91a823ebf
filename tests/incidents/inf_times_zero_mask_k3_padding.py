"""Right padding has reference log-prob 0 but a very unlikely policy log-prob, so the k3 term is infinite there before
the mask multiplies it."""

from types import SimpleNamespace

import torch
import torch.nn as nn

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("inf_times_zero_mask", "exp_overflow"),
    op=("exp",),
    index=(1, 5),
    masked=True,
    role=("kl", "ratio"),
    fix=("mask_before_op", "clamp_exponent"),
    variable=(None,),
    line=("return diff.exp() - diff - 1",),
)

PAD = 0


class Policy(nn.Module):
    def __init__(self, vocab=18, dim=10):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.cell = nn.GRU(dim, dim, batch_first=True)
        self.lm_head = nn.Linear(dim, vocab)

    def forward(self, ids):
        return self.lm_head(self.cell(self.embed(ids))[0])


def k3(policy_lp, ref_lp):
    diff = ref_lp - policy_lp
    return diff.exp() - diff - 1


def build():
    torch.manual_seed(640)
    model = Policy()
    with torch.no_grad():
        model.lm_head.bias[PAD] = -101.0  # the pad token is pushed out of the distribution
    ids = torch.randint(1, 18, (3, 9))
    ids[1, 6:] = PAD
    ids[2, 8:] = PAD
    mask = (ids[:, 1:] != PAD).float()
    ref_lp = torch.zeros(3, 8)  # the reference worker returns unpadded rows, collated with zeros
    with torch.no_grad():
        lp = model(ids[:, :-1]).log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)
        for i, n in enumerate((8, 5, 7)):
            ref_lp[i, :n] = lp[i, :n] + 0.1 * torch.randn(n)
    batch = dict(ids=ids, mask=mask, ref_lp=ref_lp, adv=torch.tensor([[1.2], [-0.7], [-0.5]]))
    return SimpleNamespace(model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-4), batch=batch)


def run(s=None):
    s = s or build()
    ids, mask = s.batch["ids"], s.batch["mask"]
    lp = s.model(ids[:, :-1]).log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)
    token_loss = -(lp - lp.detach()).exp() * s.batch["adv"] + 0.02 * k3(lp, s.batch["ref_lp"])
    loss = ((token_loss * mask).sum(1) / mask.sum(1)).mean()
    loss.backward()
    s.optimizer.step()
    return loss
