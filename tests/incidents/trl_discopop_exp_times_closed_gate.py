"""TRL DPOTrainer, loss_type="discopop" - the loss blends -logsigmoid(x) and exp(-x) by a gate sigmoid(x / tau).

One pair of long completions is strongly mis-ranked (x = beta * delta = -120): exp(-x) overflows to +inf, the gate is exactly 0, and
inf * 0 = NaN. Source: huggingface/trl, trl/trainer/dpo_trainer.py, `dpo_loss` (branch "discopop"), DiscoPOP arXiv 2406.08414.
Heals: clamp the exponent before exp; exp(logsigmoid(x / tau) - x) for the product. Does not: clamp or nan_to_num after the product, a torch.where on the finished loss.
"""

from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F
from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("inf_times_zero_coef", "exp_overflow", "seq_ratio_overflow"),
    op=("exp",),
    index=(1,),
    masked=None,
    role=("loss", "ratio", "is_weight"),
    fix=("clamp_exponent", "stable_function", "clamp_input", "mask_before_op", "skip_disabled_term"),
    variable=("exp_component",),
    line=("exp_component = torch.exp(-logits)",),
)


class TinyLM(nn.Module):
    def __init__(self, vocab=24, dim=16):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.mix = nn.Linear(dim, dim)
        self.lm_head = nn.Linear(dim, vocab, bias=False)

    def forward(self, ids):
        return self.lm_head(torch.tanh(self.mix(self.embed(ids))))


def sequence_logps(model, ids, completion_mask):
    logps = model(ids[:, :-1]).log_softmax(-1)
    per_token = logps.gather(-1, ids[:, 1:].unsqueeze(-1)).squeeze(-1)
    return (per_token * completion_mask[:, 1:]).sum(-1)


def discopop_loss(chosen_logps, rejected_logps, ref_chosen_logps, ref_rejected_logps, beta, discopop_tau):
    logratios = chosen_logps - rejected_logps
    ref_logratios = ref_chosen_logps - ref_rejected_logps
    logits = (logratios - ref_logratios) * beta
    log_ratio_modulation = torch.sigmoid(logits / discopop_tau)
    logistic_component = -F.logsigmoid(logits)
    exp_component = torch.exp(-logits)
    losses = logistic_component * (1 - log_ratio_modulation) + exp_component * log_ratio_modulation
    return losses


def build():
    torch.manual_seed(31)
    model = TinyLM()
    chosen = torch.randint(0, 24, (4, 12))
    rejected = torch.randint(0, 24, (4, 12))
    completion_mask = torch.ones(4, 12)
    completion_mask[:, :4] = 0
    with torch.no_grad():
        ref_chosen_logps = sequence_logps(model, chosen, completion_mask) + torch.tensor([0.4, 1200.0, -0.2, 0.1])
        ref_rejected_logps = sequence_logps(model, rejected, completion_mask) - torch.tensor([0.1, 1200.0, 0.0, 0.3])
    return SimpleNamespace(
        model=model,
        chosen=chosen,
        rejected=rejected,
        completion_mask=completion_mask,
        ref_chosen_logps=ref_chosen_logps,
        ref_rejected_logps=ref_rejected_logps,
        beta=0.05,
        discopop_tau=0.05,
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3),
    )


def run(s=None):
    s = s or build()
    chosen_logps = sequence_logps(s.model, s.chosen, s.completion_mask)
    rejected_logps = sequence_logps(s.model, s.rejected, s.completion_mask)
    losses = discopop_loss(chosen_logps, rejected_logps, s.ref_chosen_logps, s.ref_rejected_logps, s.beta, s.discopop_tau)
    loss = losses.mean()
    s.optimizer.zero_grad()
    loss.backward()
    s.optimizer.step()
    return loss


if __name__ == "__main__":
    print(run())
