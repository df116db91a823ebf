"""slime on-policy distillation with a teacher of another tokenizer: the teacher's log-probs are aligned to the student's response tokens, and a
student token whose boundary matches no teacher token comes back as None. The collator writes None as NaN, the reverse KL of that token is NaN,
and with it the advantage of every earlier token of the sample (return-to-go).

Source: https://github.com/THUDM/slime/pull/2032 (non-aligned positions must keep the student rollout log-prob, so that the delta is zero there).
Heals: the student log-prob at unaligned positions, or leaving the sample out. nan_to_num on the loss repairs the loss and not the gradient.
"""

from types import SimpleNamespace

import torch
import torch.nn as nn

from expected import Expected

EXPECTED = Expected(
    phase=("input",),
    cause=("bad_input",),
    op=("input", "tensor", "sub"),
    index=(1, 3),
    masked=False,
    role=("ref_log_probs", "log_probs"),
    fix=("fix_upstream", "drop_invalid_sample", "mask_before_op", "reject_input"),
    variable=("teacher_log_probs",),
    line=("reverse_kl = student_log_probs - teacher_log_probs", 'teacher_log_probs = batch["teacher_log_probs"]'),
)

VOCAB = 18


class Student(nn.Module):
    def __init__(self, dim=10):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, dim)
        self.rnn = nn.GRU(dim, dim, batch_first=True)
        self.lm_head = nn.Linear(dim, VOCAB)

    def forward(self, tokens):
        return self.lm_head(self.rnn(self.embed(tokens))[0])


def compute_log_probs(model, tokens):
    logits = model(tokens[:, :-1])
    return logits.log_softmax(-1).gather(-1, tokens[:, 1:, None]).squeeze(-1)


def align_teacher(samples):
    """Log-probs of the teacher on the student's token grid; None where no boundary agrees."""
    return torch.tensor([[float("nan") if lp is None else lp for lp in sample] for sample in samples])


def opd_advantages(student_log_probs, teacher_log_probs, loss_mask, opd_kl_coef=1.0):
    reverse_kl = student_log_probs - teacher_log_probs
    token_level_rewards = torch.where(loss_mask.bool(), -opd_kl_coef * reverse_kl, torch.zeros_like(reverse_kl))
    return token_level_rewards.flip(-1).cumsum(-1).flip(-1)


def policy_loss(log_probs, old_log_probs, advantages, loss_mask, eps_clip=0.2):
    ratio = (log_probs - old_log_probs).exp()
    pg_losses = torch.max(-ratio * advantages, -ratio.clamp(1 - eps_clip, 1 + eps_clip) * advantages)
    return (pg_losses * loss_mask).sum() / loss_mask.sum().clamp(min=1)


def build():
    torch.manual_seed(2032)
    model = Student()
    tokens = torch.randint(0, VOCAB, (3, 8))
    teacher = [
        [-1.1, -0.4, -2.0, -0.9, -1.7, -0.2, -3.1],
        [-0.6, -1.9, -0.8, None, -1.2, -2.4, -0.5],
        [-2.2, -0.7, -1.4, -0.3, -1.0, -1.6, -0.8],
    ]
    loss_mask = torch.ones(3, 7)
    loss_mask[0, 5:] = 0
    with torch.no_grad():
        rollout_log_probs = compute_log_probs(model, tokens)
    batch = {"tokens": tokens, "teacher_log_probs": align_teacher(teacher), "log_probs": rollout_log_probs, "loss_mask": loss_mask}
    return SimpleNamespace(model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3), batch=batch)


def run(s=None):
    s = s or build()
    batch = s.batch
    with torch.no_grad():
        teacher_log_probs = batch["teacher_log_probs"]
        advantages = opd_advantages(batch["log_probs"], teacher_log_probs, batch["loss_mask"])
    log_probs = compute_log_probs(s.model, batch["tokens"])
    loss = policy_loss(log_probs, batch["log_probs"], advantages, batch["loss_mask"])
    s.optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(s.model.parameters(), 1.0)
    s.optimizer.step()
    return loss


if __name__ == "__main__":
    print("loss", run().item())
