"""TRL DPOTrainer, f_divergence_type="alpha_divergence" with alpha_divergence_coef=0.

In the paper alpha -> 0 is the reverse KL, so somebody sets the coefficient to 0 to get plain DPO. The code evaluates
(u_l ** -alpha - u_w ** -alpha) / alpha literally: both powers are exactly 1 and the quotient is 0 / 0 for every pair.
Source: https://github.com/huggingface/trl/blob/v0.9.6/trl/trainer/dpo_trainer.py `dpo_loss`, `cap_exp`.
Heals: refusing the setting (use reverse_kl), or the limit, which is the difference of the log ratios. Does not: nan_to_num on the logits
(the loss is log 2 and the gradient is still NaN).
"""

from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("zero_div_zero", "zero_denominator"),
    op=("div",),
    index=(0,),
    masked=False,
    role=("logits", "log_ratio", "loss"),
    fix=("validate_config", "stable_function"),
    variable=("logits",),
    line=("logits = (cap_exp(rejected_logratios * -alpha_coef) - cap_exp(chosen_logratios * -alpha_coef)) / alpha_coef",),
)


def cap_exp(value):
    cap = torch.finfo(value.dtype).max
    return torch.exp(torch.clamp(value, max=float(torch.tensor(cap).log()) - 1e-2))


def get_batch_logps(logits, labels, label_pad_token_id=-100):
    labels = labels[:, 1:].clone()
    logits = logits[:, :-1]
    loss_mask = labels != label_pad_token_id
    labels[labels == label_pad_token_id] = 0
    per_token_logps = torch.gather(logits.log_softmax(-1), dim=2, index=labels.unsqueeze(2)).squeeze(2)
    return (per_token_logps * loss_mask).sum(-1)


def dpo_loss(
    policy_chosen_logps,
    policy_rejected_logps,
    reference_chosen_logps,
    reference_rejected_logps,
    beta,
    f_divergence_type,
    f_divergence_params,
):
    chosen_logratios = policy_chosen_logps - reference_chosen_logps
    rejected_logratios = policy_rejected_logps - reference_rejected_logps
    if f_divergence_type == "alpha_divergence":
        alpha_coef = float(f_divergence_params["alpha_divergence_coef"])
        logits = (cap_exp(rejected_logratios * -alpha_coef) - cap_exp(chosen_logratios * -alpha_coef)) / alpha_coef
    else:
        logits = chosen_logratios - rejected_logratios
    losses = -F.logsigmoid(beta * logits)
    return losses, beta * chosen_logratios.detach(), beta * rejected_logratios.detach()


class CausalLM(nn.Module):
    def __init__(self, vocab=24, dim=16):
        super().__init__()
        self.embed_tokens = nn.Embedding(vocab, dim)
        self.lm_head = nn.Linear(dim, vocab, bias=False)

    def forward(self, input_ids):
        return self.lm_head(torch.tanh(self.embed_tokens(input_ids)))


def build(alpha_divergence_coef=0.0):
    torch.manual_seed(2096)
    policy, reference = CausalLM(), CausalLM()
    input_ids = torch.randint(0, 24, (6, 9))  # three chosen, three rejected
    labels = input_ids.clone()
    labels[:, :3] = -100
    labels[4, 7:] = -100
    optimizer = torch.optim.AdamW(policy.parameters(), lr=5e-7)
    return SimpleNamespace(
        model=policy,
        reference=reference,
        optimizer=optimizer,
        input_ids=input_ids,
        labels=labels,
        beta=0.1,
        f_divergence_type="alpha_divergence",
        f_divergence_params={"alpha_divergence_coef": alpha_divergence_coef},
    )


def run(s=None):
    s = s or build()
    with torch.no_grad():
        reference_logps = get_batch_logps(s.reference(s.input_ids), s.labels)
    policy_logps = get_batch_logps(s.model(s.input_ids), s.labels)
    losses, chosen_rewards, rejected_rewards = dpo_loss(
        policy_logps[:3], policy_logps[3:], reference_logps[:3], reference_logps[3:], s.beta, s.f_divergence_type, s.f_divergence_params
    )
    s.metrics = {"rewards/margins": (chosen_rewards - rejected_rewards).mean().item()}
    loss = losses.mean()
    s.optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(s.model.parameters(), 1.0)
    s.optimizer.step()
    return loss
