"""TRL DPOTrainer, loss_type="robust" - the debiasing divides by 1 - 2 * label_smoothing.

A sweep over the assumed rate of flipped preferences reached 0.5: labels that are flipped half of the time say nothing, the noise
correction divides by 0 and each pair's loss is infinite. Source: the `robust` branch of `dpo_loss` in
https://github.com/huggingface/trl/blob/main/trl/trainer/dpo_trainer.py (rDPO, https://arxiv.org/abs/2403.00409).
Refusing a rate of 0.5 or more heals; a smaller beta or clamping the margin does not.
"""

from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("zero_denominator",),
    op=("div",),
    index=(0,),
    masked=None,
    role=("loss",),
    fix=("validate_config", "clamp_denominator"),
    variable=("losses",),
    line=("losses = (keep * (1 - self.label_smoothing) - flip * self.label_smoothing) / (1 - 2 * self.label_smoothing)",),
)


class TinyLM(nn.Module):
    def __init__(self, vocab=20, dim=10):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.lm_head = nn.Linear(dim, vocab)

    def forward(self, ids):
        return self.lm_head(torch.tanh(self.embed(ids)))


def sequence_logps(model, ids, mask):
    logps = model(ids[:, :-1]).log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)
    return (logps * mask[:, 1:]).sum(-1)


class DPO:
    def __init__(self, beta=0.1, label_smoothing=0.0):
        self.beta = beta
        self.label_smoothing = label_smoothing

    def dpo_loss(self, chosen, rejected, ref_chosen, ref_rejected):
        logits = (chosen - rejected) - (ref_chosen - ref_rejected)
        keep = -F.logsigmoid(self.beta * logits)
        flip = -F.logsigmoid(-self.beta * logits)
        losses = (keep * (1 - self.label_smoothing) - flip * self.label_smoothing) / (1 - 2 * self.label_smoothing)
        return losses


def build(label_smoothing=0.5):
    torch.manual_seed(31)
    policy, ref = TinyLM(), TinyLM()
    ref.load_state_dict(policy.state_dict())
    with torch.no_grad():
        for p in policy.parameters():
            p.add_(0.05 * torch.randn_like(p))
    ids = torch.randint(0, 20, (6, 9))
    mask = torch.ones(6, 9)
    mask[:, :3] = 0
    return SimpleNamespace(
        model=policy,
        ref=ref,
        optimizer=torch.optim.AdamW(policy.parameters(), lr=1e-4),
        ids=ids,
        mask=mask,
        trainer=DPO(beta=0.1, label_smoothing=label_smoothing),
    )


def run(s=None):
    s = s or build()
    chosen, rejected = sequence_logps(s.model, s.ids, s.mask).chunk(2)
    with torch.no_grad():
        ref_chosen, ref_rejected = sequence_logps(s.ref, s.ids, s.mask).chunk(2)
    loss = s.trainer.dpo_loss(chosen, rejected, ref_chosen, ref_rejected).mean()
    s.optimizer.zero_grad()
    loss.backward()
    s.optimizer.step()
    return loss


if __name__ == "__main__":
    print(run())
