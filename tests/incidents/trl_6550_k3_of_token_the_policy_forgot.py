"""TRL GRPO, the native k3 penalty for a token that the policy has made all but impossible.

With num_iterations > 1 a sampled token of the answer loses nearly all probability under the policy while the reference holds it: ref - policy is above 88 and exp is inf.
The token is counted. (Source: huggingface/trl, issue 3015, pull requests 6549 and 6550, trl/trainer/grpo_trainer.py, _compute_loss.)
Heals: clamping the log ratio at 20 before the exp. Does not: clamping per_token_kl after it (loss finite, gradient NaN); a smaller beta; gradient clipping; expm1.
"""

from types import SimpleNamespace

import torch
from torch import nn

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("exp_overflow",),
    op=("exp",),
    index=(1, 3),
    masked=False,
    role=("kl", "ratio"),
    fix=("clamp_exponent", "clamp_input"),
    variable=(None,),
    line=("per_token_kl = torch.exp(ref_per_token_logps - per_token_logps) - (ref_per_token_logps - per_token_logps) - 1",),
)


class Policy(nn.Module):
    def __init__(self, vocab=26, dim=16):
        super().__init__()
        self.embed_tokens = nn.Embedding(vocab, dim)
        self.norm = nn.RMSNorm(dim)
        self.lm_head = nn.Linear(dim, vocab, bias=False)

    def forward(self, input_ids):
        return self.lm_head(self.norm(self.embed_tokens(input_ids)))


def get_per_token_logps(model, input_ids, logits_to_keep):
    logits = model(input_ids)[:, :-1, :][:, -logits_to_keep:, :]
    index = input_ids[:, -logits_to_keep:]
    return torch.log_softmax(logits, dim=-1).gather(-1, index.unsqueeze(-1)).squeeze(-1)


def compute_loss(model, inputs, beta=0.04, epsilon=0.2):
    completion_mask = inputs["completion_mask"]
    per_token_logps = get_per_token_logps(model, inputs["input_ids"], completion_mask.size(1))
    ref_per_token_logps = inputs["ref_per_token_logps"]
    per_token_kl = torch.exp(ref_per_token_logps - per_token_logps) - (ref_per_token_logps - per_token_logps) - 1
    advantages = inputs["advantages"].unsqueeze(1)
    coef_1 = torch.exp(per_token_logps - inputs["old_per_token_logps"])
    coef_2 = torch.clamp(coef_1, 1 - epsilon, 1 + epsilon)
    per_token_loss = -torch.min(coef_1 * advantages, coef_2 * advantages)
    per_token_loss = per_token_loss + beta * per_token_kl
    return ((per_token_loss * completion_mask).sum(-1) / completion_mask.sum(-1).clamp(min=1.0)).mean()


def build():
    torch.manual_seed(31)
    model = Policy()
    input_ids = torch.randint(0, 24, (4, 10))
    input_ids[1, 6] = 24
    input_ids[1, 7] = 25
    ref = get_per_token_logps(model, input_ids, 6).detach() + 0.05 * torch.randn(4, 6)
    with torch.no_grad():
        direction = model.norm(model.embed_tokens.weight[24])
        model.lm_head.weight[25] -= 6.5 * direction
    old = get_per_token_logps(model, input_ids, 6).detach() + 0.02 * torch.randn(4, 6)
    completion_mask = torch.ones(4, 6)
    completion_mask[0, 5:] = 0
    completion_mask[3, 3:] = 0
    return SimpleNamespace(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3),
        inputs={
            "input_ids": input_ids,
            "completion_mask": completion_mask,
            "advantages": torch.tensor([0.7, -1.2, 0.9, -0.4]),
            "ref_per_token_logps": ref,
            "old_per_token_logps": old,
        },
    )


def run(s=None):
    s = s or build()
    loss = compute_loss(s.model, s.inputs)
    s.optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(s.model.parameters(), 1.0)
    s.optimizer.step()
    return loss


if __name__ == "__main__":
    print(run())
