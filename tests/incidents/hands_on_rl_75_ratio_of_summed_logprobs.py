"""hands-on-modern-rl, the GRPO example whose ratio is of the summed log-prob of the whole answer.

sequence_logprob sums the masked token log-probs and grpo_loss takes exp of the difference: for an answer of 60 tokens which the policy has learned meanwhile, at some 2 nats
a token, the difference is above 88. The advantage is negative, so min takes the unclipped branch: inf. (Source: walkinglabs/hands-on-modern-rl, issue 75.)
Heals: clamping the difference before the exp. Does not: clamping the ratio after the exp (gradient 0 * inf); masking tokens (they all count); gradient clipping.
"""

import copy
from types import SimpleNamespace

import torch
from torch import nn

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("seq_ratio_overflow", "exp_overflow"),
    op=("exp",),
    index=(2,),
    masked=False,
    role=("ratio", "is_weight"),
    fix=("clamp_exponent", "drop_invalid_sample"),
    variable=("ratio",),
    line=("ratio = torch.exp(new_logprobs - old_logprobs)",),
)


class CausalLM(nn.Module):
    def __init__(self, vocab=30, dim=16):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.fc = nn.Linear(dim, dim)
        self.head = nn.Linear(dim, vocab)

    def forward(self, input_ids):
        x = self.embed(input_ids)
        return self.head(x + torch.relu(self.fc(x)))


def sequence_logprob(model, input_ids, target_mask):
    logits = model(input_ids)[:, :-1, :]
    targets = input_ids[:, 1:]
    logprobs = torch.log_softmax(logits, dim=-1)
    picked_logprobs = logprobs.gather(-1, targets.unsqueeze(-1)).squeeze(-1)
    response_logprobs = picked_logprobs * target_mask[:, 1:]
    return response_logprobs.sum(dim=-1)


def grpo_loss(new_logprobs, old_logprobs, rewards, clip_eps=0.2):
    advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-8)
    ratio = torch.exp(new_logprobs - old_logprobs)
    unclipped = ratio * advantages
    clipped = torch.clamp(ratio, 1 - clip_eps, 1 + clip_eps) * advantages
    return -torch.min(unclipped, clipped).mean()


def build():
    torch.manual_seed(13)
    model = CausalLM()
    input_ids = torch.randint(2, 30, (4, 66))
    input_ids[2, 6:] = 1
    target_mask = torch.zeros(4, 66)
    target_mask[:, 6:] = 1
    target_mask[0, 30:] = 0
    target_mask[3, 40:] = 0
    old_model = copy.deepcopy(model)
    with torch.no_grad():
        model.head.weight[1] += 0.35 * model.embed.weight[1]
    old_logprobs = sequence_logprob(old_model, input_ids, target_mask).detach()
    return SimpleNamespace(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3),
        input_ids=input_ids,
        target_mask=target_mask,
        old_logprobs=old_logprobs,
        rewards=torch.tensor([1.0, 0.5, 0.0, 1.0]),
    )


def run(s=None):
    s = s or build()
    new_logprobs = sequence_logprob(s.model, s.input_ids, s.target_mask)
    loss = grpo_loss(new_logprobs, s.old_logprobs, s.rewards)
    s.optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(s.model.parameters(), 1.0)
    s.optimizer.step()
    return loss


if __name__ == "__main__":
    print(run())
