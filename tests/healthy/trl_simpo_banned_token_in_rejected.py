"""TRL CPO/SimPO - the model bans a special token (logit -inf) and a rejected answer written by another model contains it. The rejected
log-prob is -inf and the margin +inf: logsigmoid(+inf) is 0 with gradient 0, the pair is simply solved. The logged rewards show inf;
the loss, the gradients of the other pairs and the weights are right.

https://github.com/huggingface/trl/blob/main/trl/experimental/cpo/cpo_trainer.py (loss_type "simpo")
"""

from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F


class CausalLM(nn.Module):
    def __init__(self, vocab=20, dim=10, banned=(19,)):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.block = nn.Linear(dim, dim)
        self.lm_head = nn.Linear(dim, vocab, bias=False)
        ban = torch.zeros(vocab, dtype=torch.bool)
        ban[list(banned)] = True
        self.register_buffer("ban", ban)

    def forward(self, ids):
        h = self.embed(ids)
        return self.lm_head(h + torch.tanh(self.block(h))).masked_fill(self.ban, float("-inf"))


def get_batch_logps(logits, labels, label_pad_token_id=-100):
    labels = labels[:, 1:].clone()
    logits = logits[:, :-1]
    loss_mask = labels != label_pad_token_id
    labels[~loss_mask] = 0
    per_token_logps = logits.log_softmax(-1).gather(2, labels.unsqueeze(2)).squeeze(2)
    return (per_token_logps * loss_mask).sum(-1) / loss_mask.sum(-1)


def simpo_loss(policy_chosen_logps, policy_rejected_logps, beta=2.0, simpo_gamma=0.5):
    logits = policy_chosen_logps - policy_rejected_logps - simpo_gamma / beta
    losses = -F.logsigmoid(beta * logits)
    chosen_rewards = beta * policy_chosen_logps.detach()
    rejected_rewards = beta * policy_rejected_logps.detach()
    return losses, chosen_rewards, rejected_rewards


def build():
    torch.manual_seed(2024)
    model = CausalLM()
    chosen_ids = torch.randint(0, 19, (3, 8))
    rejected_ids = torch.randint(0, 19, (3, 8))
    rejected_ids[1, 5] = 19  # an image placeholder in the answer of another model
    chosen_labels, rejected_labels = chosen_ids.clone(), rejected_ids.clone()
    chosen_labels[:, :3] = -100
    rejected_labels[:, :3] = -100
    rejected_labels[2, 6:] = -100
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    return SimpleNamespace(
        model=model,
        optimizer=optimizer,
        chosen_ids=chosen_ids,
        rejected_ids=rejected_ids,
        chosen_labels=chosen_labels,
        rejected_labels=rejected_labels,
        metrics=[],
    )


def run(s=None):
    s = s or build()
    for _ in range(2):
        chosen_logps = get_batch_logps(s.model(s.chosen_ids), s.chosen_labels)
        rejected_logps = get_batch_logps(s.model(s.rejected_ids), s.rejected_labels)
        losses, chosen_rewards, rejected_rewards = simpo_loss(chosen_logps, rejected_logps)
        loss = losses.mean()
        s.optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(s.model.parameters(), 1.0)
        s.optimizer.step()
        s.metrics.append(
            {"rewards/rejected": rejected_rewards.mean().item(), "rewards/margins": (chosen_rewards - rejected_rewards).mean().item()}
        )
    return loss


if __name__ == "__main__":
    run()
