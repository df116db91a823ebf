"""tinker-cookbook folds the KL against the base model into the advantages: coef * mask * (mean log-prob difference - difference). Every trajectory of
this batch lost its action mask (all answers overran and were masked), the mean is 0 / 0, and 0 * NaN makes every advantage NaN.

Source: https://github.com/thinking-machines-lab/tinker-cookbook tinker_cookbook/rl/metrics.py, incorporate_kl_penalty (avg = sum of differences / sum
of masks, no guard). Heals: clamping the token count or passing such a batch by. A coefficient of 0 does not.
"""

from types import SimpleNamespace

import torch
import torch.nn as nn

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("empty_mask_mean", "zero_div_zero"),
    op=("div",),
    index=(),
    masked=None,
    role=("kl", "log_ratio"),
    fix=("guard_empty", "clamp_denominator", "skip_bad_step"),
    variable=("avg_logp_diff",),
    line=("avg_logp_diff = sum(diff.sum() for diff in logprob_diffs) / sum(mask.sum() for mask in float_masks)",),
)


class LoraPolicy(nn.Module):
    def __init__(self, vocab=20, dim=8, rank=2):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim).requires_grad_(False)
        self.lm_head = nn.Linear(dim, vocab, bias=False).requires_grad_(False)
        self.lora_a = nn.Parameter(torch.randn(rank, dim) * 0.1)
        self.lora_b = nn.Parameter(torch.zeros(vocab, rank))

    def forward(self, tokens, use_base=False):
        hidden = torch.tanh(self.embed(tokens))
        logits = self.lm_head(hidden)
        return logits if use_base else logits + hidden @ self.lora_a.T @ self.lora_b.T


def compute_logprobs(model, datum, use_base=False):
    logits = model(datum["model_input"], use_base=use_base)
    return logits.log_softmax(-1).gather(-1, datum["target_tokens"][:, None]).squeeze(-1)


@torch.no_grad()
def incorporate_kl_penalty(data_D, model, kl_penalty_coef):
    base_logprobs_D = [compute_logprobs(model, datum, use_base=True) for datum in data_D]
    float_masks = [datum["mask"].float() for datum in data_D]
    logprob_diffs = [(datum["logprobs"] - base) * mask for datum, base, mask in zip(data_D, base_logprobs_D, float_masks)]
    avg_logp_diff = sum(diff.sum() for diff in logprob_diffs) / sum(mask.sum() for mask in float_masks)
    for datum, diff, mask in zip(data_D, logprob_diffs, float_masks):
        datum["advantages"] = datum["advantages"] + kl_penalty_coef * mask * (avg_logp_diff - diff)


def importance_sampling_loss(model, data_D):
    loss = 0.0
    for datum in data_D:
        prob_ratio = torch.exp(compute_logprobs(model, datum) - datum["logprobs"])
        loss = loss - (prob_ratio * datum["advantages"]).sum()
    return loss


def build():
    torch.manual_seed(11)
    model = LoraPolicy()
    data_D = []
    for length, reward in [(6, 0.5), (8, -0.5), (7, 0.0)]:
        tokens = torch.randint(0, 20, (length + 1,))
        mask = torch.zeros(length)  # overran max_tokens: no token of the answer is trained
        datum = {"model_input": tokens[:-1], "target_tokens": tokens[1:], "mask": mask, "advantages": reward * mask}
        with torch.no_grad():
            datum["logprobs"] = compute_logprobs(model, datum) + 0.01 * torch.randn(length)
        data_D.append(datum)
    params = [p for p in model.parameters() if p.requires_grad]
    return SimpleNamespace(model=model, optimizer=torch.optim.Adam(params, lr=1e-4, eps=1e-12), data_D=data_D)


def run(s=None, kl_penalty_coef=0.05):
    s = s or build()
    incorporate_kl_penalty(s.data_D, s.model, kl_penalty_coef)
    loss = importance_sampling_loss(s.model, s.data_D)
    s.optimizer.zero_grad()
    loss.backward()
    s.optimizer.step()
    return loss


if __name__ == "__main__":
    print("loss", run().item())
