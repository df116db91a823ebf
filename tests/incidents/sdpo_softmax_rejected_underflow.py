"""S-DPO's softmax loss sums exp(beta * (rejected - chosen)) over the rejected items and takes -log of the sum.

Late in training one user's chosen title is so far ahead (more than 104 nats over every rejected one) that each exp underflows to 0 in
float32. log(0) is -inf, its negative goes into logsigmoid, which answers a perfect 0: the loss is finite and small, and backward divides
0 by 0 in the log, so every gradient is NaN.

Source: https://github.com/chenyuxin1999/S-DPO/blob/main/trainer/softmax_dpo_trainer.py (dpo_loss)
Heals: -logsumexp of the scaled differences; clamping the sum, or the exponent, from below. Does not: nan_to_num of the losses.
"""

import copy
from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F
from expected import Expected

EXPECTED = Expected(
    phase=("backward",),
    cause=("log_zero",),
    op=("log",),
    index=(2,),
    masked=None,
    role=("logits", "log_ratio", "ratio", "loss"),
    fix=("stable_function", "clamp_input", "clamp_exponent"),
    variable=(None,),
    line=("temp1 = -torch.log(temp)",),
)

PROMPT_LEN = 3
BETA = 1.0


class ItemLM(nn.Module):
    def __init__(self, vocab=24, dim=16):
        super().__init__()
        self.embed_tokens = nn.Embedding(vocab, dim)
        self.proj = nn.Linear(dim, dim)
        self.lm_head = nn.Linear(dim, vocab, bias=False)

    def forward(self, input_ids):
        return self.lm_head(torch.tanh(self.proj(self.embed_tokens(input_ids))))


def get_batch_logps(model, input_ids):
    """Sum of the log-probabilities of the title's tokens."""
    logits = model(input_ids[:, :-1])
    per_token_logps = logits.log_softmax(-1).gather(-1, input_ids[:, 1:, None]).squeeze(-1)
    return per_token_logps[:, PROMPT_LEN - 1 :].sum(-1)


def softmax_dpo_loss(policy_chosen_logps, policy_rejected_logps, reference_chosen_logps, reference_rejected_logps):
    chosen_logratios = policy_chosen_logps - reference_chosen_logps
    rejected_logratios = {}
    for key in policy_rejected_logps:
        rejected_logratios[key] = policy_rejected_logps[key] - reference_rejected_logps[key]
    temp = sum(torch.exp(BETA * (rejected_logratios[key] - chosen_logratios)) for key in rejected_logratios)
    temp1 = -torch.log(temp)
    losses = -F.logsigmoid(temp1)
    chosen_rewards = BETA * chosen_logratios.detach()
    return losses, chosen_rewards


@torch.no_grad()
def title(model, prompt, rank, length=8):
    """A title whose tokens stand at the given rank of the model's next-token list."""
    ids = prompt
    for _ in range(length):
        next_token = model(ids)[:, -1].argsort(-1, descending=True)[:, rank]
        ids = torch.cat([ids, next_token[:, None]], 1)
    return ids


def build():
    torch.manual_seed(2101)
    policy = ItemLM()
    reference = copy.deepcopy(policy).requires_grad_(False)
    with torch.no_grad():
        policy.lm_head.weight.mul_(22.0)  # third epoch: the policy has become sharp
    prompts = torch.randint(0, 24, (4, PROMPT_LEN))
    chosen = title(policy, prompts, 0)
    rejected = {f"rejected{k}": title(policy, prompts, k) for k in (1, 2, 3)}
    for k in (1, 2, 3):  # the third user's rejected titles share nothing with what the policy expects
        rejected[f"rejected{k}"][2] = title(policy, prompts, -k)[2]
    return SimpleNamespace(
        model=policy,
        policy=policy,
        reference=reference,
        chosen=chosen,
        rejected=rejected,
        optimizer=torch.optim.AdamW(policy.parameters(), lr=1e-5),
    )


def run(s=None):
    s = s or build()
    policy_chosen = get_batch_logps(s.policy, s.chosen)
    policy_rejected = {key: get_batch_logps(s.policy, ids) for key, ids in s.rejected.items()}
    with torch.no_grad():
        reference_chosen = get_batch_logps(s.reference, s.chosen)
        reference_rejected = {key: get_batch_logps(s.reference, ids) for key, ids in s.rejected.items()}
    losses, s.chosen_rewards = softmax_dpo_loss(policy_chosen, policy_rejected, reference_chosen, reference_rejected)
    loss = losses.mean()
    s.optimizer.zero_grad()
    loss.backward()
    s.optimizer.step()
    return loss
