"""TRL CPOTrainer with AlphaPO (`alpha > 0`) and the default loss, which sums the log-probs of an answer. exp(logp) of a long answer is 0 in
fp32, 0 ** (-alpha) is inf, the loss is inf and the gradient NaN. AlphaPO was meant for averaged log-probs.

https://github.com/huggingface/trl/blob/main/trl/experimental/cpo/cpo_trainer.py (CPOTrainer.cpo_loss, "Apply AlphaPO reward transformation")

Heals: (1 - exp(-alpha * logp)) / alpha, which never forms the probability; a floor under the probability. Does not: clamping the reward
after the power (the loss becomes finite, backward is 0 * inf), or a smaller beta.
"""

from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("zero_denominator", "log_zero", "exp_overflow", "magnitude_overflow"),
    op=("pow",),
    index=(1,),
    masked=None,
    role=("rewards", "log_probs", "logits"),
    fix=("stable_function", "clamp_input", "clamp_denominator", "clamp_exponent", "avoid_singular_op"),
    variable=(None,),
    line=("policy_chosen_rewards = (1 - chosen_probs.pow(-self.alpha)) / self.alpha",),
)


class CPOTrainer:
    def __init__(self, model, beta=0.1, alpha=0.25, label_pad_token_id=-100):
        self.model = model
        self.beta = beta
        self.alpha = alpha
        self.label_pad_token_id = label_pad_token_id

    def get_batch_logps(self, logits, labels):
        labels = labels[:, 1:].clone()
        logits = logits[:, :-1, :]
        loss_mask = labels != self.label_pad_token_id
        labels[labels == self.label_pad_token_id] = 0
        per_token_logps = logits.log_softmax(-1).gather(-1, labels.unsqueeze(-1)).squeeze(-1)
        return (per_token_logps * loss_mask).sum(-1)

    def cpo_loss(self, policy_chosen_logps, policy_rejected_logps):
        if self.alpha != 0.0:
            chosen_probs = torch.exp(policy_chosen_logps)
            rejected_probs = torch.exp(policy_rejected_logps)
            policy_chosen_rewards = (1 - chosen_probs.pow(-self.alpha)) / self.alpha
            policy_rejected_rewards = (1 - rejected_probs.pow(-self.alpha)) / self.alpha
            logits = policy_chosen_rewards - policy_rejected_rewards
        else:
            logits = policy_chosen_logps - policy_rejected_logps
        return -F.logsigmoid(self.beta * logits)

    def compute_loss(self, batch):
        len_chosen = batch["chosen_labels"].shape[0]
        all_logits = self.model(batch["concatenated_input_ids"])
        labels = torch.cat([batch["chosen_labels"], batch["rejected_labels"]])
        all_logps = self.get_batch_logps(all_logits, labels)
        return self.cpo_loss(all_logps[:len_chosen], all_logps[len_chosen:]).mean()


def build():
    torch.manual_seed(2201)
    model = nn.Sequential(nn.Embedding(40, 12), nn.Linear(12, 40))
    answer_lengths = [[9, 44, 12], [11, 14, 8]]  # chosen, rejected; the second chosen answer is a long one
    labels = torch.full((2, 3, 48), -100)
    input_ids = torch.randint(1, 40, (2, 3, 48))
    for side in range(2):
        for i, n in enumerate(answer_lengths[side]):
            labels[side, i, 3 : 3 + n] = input_ids[side, i, 3 : 3 + n]
            input_ids[side, i, 3 + n :] = 0
    batch = dict(concatenated_input_ids=input_ids.view(6, 48), chosen_labels=labels[0], rejected_labels=labels[1])
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-7)
    return SimpleNamespace(model=model, optimizer=optimizer, trainer=CPOTrainer(model), batch=batch)


def run(s=None):
    s = s or build()
    loss = s.trainer.compute_loss(s.batch)
    s.optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(s.model.parameters(), 1.0)
    s.optimizer.step()
    return loss


if __name__ == "__main__":
    run()
