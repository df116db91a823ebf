"""HALOs, IPOTrainer - length-normalised rewards at the first step, where the policy still is the reference.

get_sequence_rewards counts the tokens of a sequence as those whose policy and reference log-probs differ. Dropout is disabled and the reference is a copy
of the policy, so at step one no token differs: the count is 0 and every reward 0 / 0. (Source: ContextualAI/HALOs, train/trainers.py,
get_sequence_rewards with length_normalized and IPOTrainer.loss.) Heals: clamping the count to 1; an epsilon on it; counting by the labels (!= -100); a
where on the count. Does not: float64, another tau, a smaller learning rate, nan_to_num of the rewards (gradient NaN).
"""

import copy
from types import SimpleNamespace

import torch
from torch import nn

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("zero_div_zero", "empty_mask_mean"),
    op=("div", "truediv"),
    index=(0,),
    masked=None,
    role=("rewards", "log_ratio"),
    fix=("clamp_denominator", "guard_empty", "representable_eps", "fix_upstream", "where_on_detached"),
    variable=("sequence_rewards", "chosen_rewards"),
    line=("sequence_rewards = token_rewards.sum(-1) / normalization_factor",),
)


class Policy(nn.Module):
    def __init__(self, vocab=24, dim=16):
        super().__init__()
        self.wte = nn.Embedding(vocab, dim)
        self.block = nn.Sequential(nn.Linear(dim, dim), nn.Tanh())
        self.lm_head = nn.Linear(dim, vocab, bias=False)

    def forward(self, input_ids):
        return self.lm_head(self.block(self.wte(input_ids)))


class IPOTrainer:
    def __init__(self, policy, reference_model, optimizer, tau=0.1):
        self.policy, self.reference_model, self.optimizer, self.tau = policy, reference_model, optimizer, tau

    def get_batch_logps(self, logits, labels):
        assert logits.shape[:-1] == labels.shape
        labels = labels[:, 1:].clone()
        logits = logits[:, :-1, :]
        loss_mask = labels != -100
        labels[labels == -100] = 0
        distribution_logps = logits.float().log_softmax(-1)
        per_token_logps = torch.gather(distribution_logps, dim=2, index=labels.unsqueeze(2)).squeeze(2)
        return per_token_logps * loss_mask

    def get_sequence_rewards(self, policy_logps, reference_logps, length_normalized=False):
        token_rewards = policy_logps - reference_logps
        normalization_factor = (token_rewards.abs() != 0).float().sum(-1) if length_normalized else 1
        sequence_rewards = token_rewards.sum(-1) / normalization_factor
        return sequence_rewards

    def loss(self, policy_chosen_logps, policy_rejected_logps, reference_chosen_logps, reference_rejected_logps):
        chosen_rewards = self.get_sequence_rewards(policy_chosen_logps, reference_chosen_logps, length_normalized=True)
        rejected_rewards = self.get_sequence_rewards(policy_rejected_logps, reference_rejected_logps, length_normalized=True)
        losses = (chosen_rewards - rejected_rewards - (1 / (2 * self.tau))).pow(2)
        return losses

    def forward(self, model, batch):
        chosen = self.get_batch_logps(model(batch["chosen_combined_input_ids"]), batch["chosen_labels"])
        rejected = self.get_batch_logps(model(batch["rejected_combined_input_ids"]), batch["rejected_labels"])
        return chosen, rejected

    def train_step(self, batch):
        policy_chosen_logps, policy_rejected_logps = self.forward(self.policy, batch)
        with torch.no_grad():
            reference_chosen_logps, reference_rejected_logps = self.forward(self.reference_model, batch)
        loss = self.loss(policy_chosen_logps, policy_rejected_logps, reference_chosen_logps, reference_rejected_logps).mean()
        self.optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.policy.parameters(), 10.0)
        self.optimizer.step()
        return loss


def build():
    torch.manual_seed(3)
    policy = Policy()
    reference_model = copy.deepcopy(policy).requires_grad_(False)
    optimizer = torch.optim.RMSprop(policy.parameters(), lr=5e-4)
    batch = {}
    for side, lengths in (("chosen", [7, 9, 6]), ("rejected", [9, 5, 8])):
        ids = torch.randint(1, 24, (3, 9))
        labels = ids.clone()
        labels[:, :3] = -100
        for row, length in enumerate(lengths):
            ids[row, length:] = 0
            labels[row, length:] = -100
        batch[f"{side}_combined_input_ids"], batch[f"{side}_labels"] = ids, labels
    return SimpleNamespace(model=policy, optimizer=optimizer, trainer=IPOTrainer(policy, reference_model, optimizer), batch=batch)


def run(s=None):
    s = s or build()
    return s.trainer.train_step(s.batch)


if __name__ == "__main__":
    print(run())
