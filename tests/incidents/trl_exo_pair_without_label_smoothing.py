"""TRL / Liger DPO loss "exo_pair" - the loss is a KL to a smoothed preference (1 - eps, eps) and contains log(eps). With the default
label_smoothing = 0.0 that is log(0) = -inf: the loss is +inf for every pair and the gradients are infinite or NaN.

https://github.com/huggingface/trl/blob/main/trl/trainer/dpo_trainer.py (loss_type "exo_pair"; older versions set eps to 1e-3 silently)
Heals: a label_smoothing above 0 (validated or floored). Does not: a smaller beta, gradient clipping, nan_to_num of the losses.
"""

from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("log_zero",),
    op=("log",),
    index=(),
    masked=None,
    role=("log_probs", "ref_log_probs", "kl", "loss"),
    fix=("validate_config", "clamp_input", "representable_eps"),
    variable=(None,),
    line=("losses = qw * (log_qw - torch.log1p(-epsilon)) + ql * (log_ql - torch.log(epsilon))",),
)


class Policy(nn.Module):
    def __init__(self, vocab=18, dim=12):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.block = nn.Linear(dim, dim)
        self.lm_head = nn.Linear(dim, vocab, bias=False)

    def forward(self, ids):
        h = self.embed(ids)
        return self.lm_head(h + F.gelu(self.block(h)))


def sequence_logps(model, ids, completion_mask):
    logits = model(ids[:, :-1])
    per_token_logps = logits.log_softmax(-1).gather(-1, ids[:, 1:].unsqueeze(-1)).squeeze(-1)
    return (per_token_logps * completion_mask[:, 1:]).sum(-1)


def dpo_loss(chosen_logps, rejected_logps, ref_chosen_logps, ref_rejected_logps, beta=0.1, label_smoothing=0.0, loss_type="exo_pair"):
    chosen_scores = chosen_logps - ref_chosen_logps
    rejected_scores = rejected_logps - ref_rejected_logps
    delta_score = beta * (chosen_scores - rejected_scores)
    if loss_type == "sigmoid":
        losses = -F.logsigmoid(delta_score) * (1 - label_smoothing) - F.logsigmoid(-delta_score) * label_smoothing
    elif loss_type == "exo_pair":
        epsilon = torch.tensor(label_smoothing)
        qw, log_qw = torch.sigmoid(delta_score), F.logsigmoid(delta_score)
        ql, log_ql = torch.sigmoid(-delta_score), F.logsigmoid(-delta_score)
        losses = qw * (log_qw - torch.log1p(-epsilon)) + ql * (log_ql - torch.log(epsilon))
    else:
        raise ValueError(loss_type)
    return losses.mean()


def build():
    torch.manual_seed(16)
    model = Policy()
    chosen_ids = torch.randint(0, 18, (3, 8))
    rejected_ids = torch.randint(0, 18, (3, 8))
    completion_mask = torch.ones(3, 8)
    completion_mask[:, :3] = 0
    with torch.no_grad():
        ref_chosen_logps = sequence_logps(model, chosen_ids, completion_mask)
        ref_rejected_logps = sequence_logps(model, rejected_ids, completion_mask)
        model.block.weight.add_(0.02 * torch.randn(12, 12))  # some steps away from the reference
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6)
    return SimpleNamespace(
        model=model,
        optimizer=optimizer,
        chosen_ids=chosen_ids,
        rejected_ids=rejected_ids,
        mask=completion_mask,
        ref_chosen_logps=ref_chosen_logps,
        ref_rejected_logps=ref_rejected_logps,
        args=dict(beta=0.1, label_smoothing=0.0, loss_type="exo_pair"),
    )


def run(s=None):
    s = s or build()
    chosen_logps = sequence_logps(s.model, s.chosen_ids, s.mask)
    rejected_logps = sequence_logps(s.model, s.rejected_ids, s.mask)
    loss = dpo_loss(chosen_logps, rejected_logps, s.ref_chosen_logps, s.ref_rejected_logps, **s.args)
    s.optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(s.model.parameters(), 1.0)
    s.optimizer.step()
    return loss


if __name__ == "__main__":
    run()
