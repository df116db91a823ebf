"""TRL MiniLLMTrainer with gamma > 0 and length normalisation: the return-to-go of token t is divided by the sum of gamma ** i over i >= t.
gamma ** i is taken from the start of the answer, so far down a long answer it is 0 in fp32: both the sum and the length are 0, 0 / 0.

https://github.com/huggingface/trl/blob/main/trl/experimental/minillm/minillm_trainer.py (MiniLLMTrainer._compute_advantage)

Heals: a floor under the lengths, fp64, or the recursion A_t = r_t + gamma * A_{t+1}, which needs no power of gamma. Does not: a larger
value for the masked positions than 1e-4 (the tokens at fault are not masked), or clipping the gradient.
"""

from types import SimpleNamespace

import torch
import torch.nn as nn

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("zero_div_zero", "zero_denominator"),
    op=("div",),
    index=(0, 150),
    masked=False,
    role=("advantages",),
    fix=("clamp_denominator", "stable_function", "clamp_input", "upcast_fp32", "validate_config", "representable_eps"),
    variable=("advantages",),
    line=("advantages = advantages / lengths",),
)


class MiniLLMTrainer:
    def __init__(self, model, teacher_model, gamma=0.5, length_normalization=True):
        self.model = model
        self.teacher_model = teacher_model
        self.gamma = gamma
        self.length_normalization = length_normalization

    def _compute_advantage(self, student_log_probs_on_labels, teacher_log_probs_on_labels, mask):
        response_length = student_log_probs_on_labels.size(1)
        mask = mask.float()
        student_log_probs_on_labels = student_log_probs_on_labels * mask
        teacher_log_probs_on_labels = teacher_log_probs_on_labels * mask
        rewards = teacher_log_probs_on_labels - student_log_probs_on_labels
        if self.gamma > 0.0:
            gamma_pow = torch.pow(self.gamma, torch.arange(response_length, device=rewards.device))
            advantages = rewards * gamma_pow
            advantages = advantages.flip(1).cumsum(dim=1).flip(1)
            if self.length_normalization:
                mask = torch.where(mask < 0.5, 1e-4, mask)
                lengths = mask * gamma_pow
                lengths = lengths.flip(1).cumsum(dim=1).flip(1)
                advantages = advantages / lengths
        else:
            advantages = rewards
        return advantages

    def compute_loss(self, inputs):
        completion_ids, mask = inputs["completion_ids"], inputs["completion_mask"]
        contexts = torch.cat([inputs["prompt_ids"], completion_ids], dim=1)[:, :-1]
        student_log_probs = self.model(contexts)[:, -completion_ids.size(1) :].log_softmax(-1)
        with torch.no_grad():
            teacher_log_probs = self.teacher_model(contexts)[:, -completion_ids.size(1) :].log_softmax(-1)
        student_on_labels = student_log_probs.gather(-1, completion_ids.unsqueeze(-1)).squeeze(-1)
        teacher_on_labels = teacher_log_probs.gather(-1, completion_ids.unsqueeze(-1)).squeeze(-1)
        advantages = self._compute_advantage(student_on_labels.detach(), teacher_on_labels, mask)
        old_on_labels = student_on_labels.detach()
        per_token_loss = -torch.exp(student_on_labels - old_on_labels) * advantages
        return (per_token_loss * mask).sum() / mask.sum()


def build():
    torch.manual_seed(2202)
    model = nn.Sequential(nn.Embedding(24, 8), nn.Linear(8, 24))
    teacher_model = nn.Sequential(nn.Embedding(24, 16), nn.Linear(16, 24)).requires_grad_(False)
    completion_ids = torch.randint(1, 24, (2, 160))
    completion_mask = torch.ones(2, 160)
    completion_mask[1, 90:] = 0.0  # the second answer ended early
    inputs = dict(prompt_ids=torch.randint(1, 24, (2, 4)), completion_ids=completion_ids, completion_mask=completion_mask)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    return SimpleNamespace(model=model, optimizer=optimizer, trainer=MiniLLMTrainer(model, teacher_model), inputs=inputs)


def run(s=None):
    s = s or build()
    loss = s.trainer.compute_loss(s.inputs)
    s.optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(s.model.parameters(), 1.0)
    s.optimizer.step()
    return loss


if __name__ == "__main__":
    run()
