"""A rejected answer contains a token that both policy and reference forbid with -inf, so both sequence log-probs are
-inf and DPO subtracts them."""

from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("inf_minus_inf",),
    op=("sub",),
    index=(1,),
    masked=False,
    role=("log_ratio", "log_probs"),
    fix=("drop_invalid_sample", "finite_mask_fill"),
    variable=(None,),
    line=("margin = (pi_chosen - ref_chosen) - (pi_rejected - ref_rejected)",),
)


class LM(nn.Module):
    def __init__(self, vocab, banned):
        super().__init__()
        self.embed = nn.Embedding(vocab, 8)
        self.head = nn.Linear(8, vocab)
        self.register_buffer("banned", torch.zeros(vocab, dtype=torch.bool))
        self.banned[banned] = True

    def forward(self, ids):
        return self.head(self.embed(ids)).masked_fill(self.banned, float("-inf"))


def sequence_logps(model, ids):
    lp = F.log_softmax(model(ids[:, :-1]), dim=-1)
    return torch.take_along_dim(lp, ids[:, 1:, None], dim=-1).squeeze(-1).sum(-1)


class DPOLoss(nn.Module):
    def __init__(self, beta):
        super().__init__()
        self.beta = beta

    def forward(self, pi_chosen, pi_rejected, ref_chosen, ref_rejected):
        margin = (pi_chosen - ref_chosen) - (pi_rejected - ref_rejected)
        return -F.logsigmoid(self.beta * margin).mean()


def build():
    torch.manual_seed(21)
    model, ref = LM(17, banned=[16, 4]), LM(17, banned=[16, 4])
    ref.load_state_dict(model.state_dict())
    ref.requires_grad_(False)
    allowed = torch.tensor([t for t in range(16) if t != 4])
    chosen = allowed[torch.randint(0, 15, (3, 7))]
    rejected = allowed[torch.randint(0, 15, (3, 7))]
    rejected[1, 5] = 4
    batch = dict(chosen=chosen, rejected=rejected)
    return SimpleNamespace(
        model=model, ref=ref, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-4), batch=batch, loss_fn=DPOLoss(0.1)
    )


def run(s=None):
    s = s or build()
    chosen, rejected = s.batch["chosen"], s.batch["rejected"]
    with torch.no_grad():
        ref_c, ref_r = sequence_logps(s.ref, chosen), sequence_logps(s.ref, rejected)
    loss = s.loss_fn(sequence_logps(s.model, chosen), sequence_logps(s.model, rejected), ref_chosen=ref_c, ref_rejected=ref_r)
    loss.backward()
    s.optimizer.step()
    return loss
