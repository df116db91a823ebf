"""NeMo RL, ClippedPGLossFn with a k3 reference penalty over a row with tool output.

The policy has learned to suppress the tool-role token, the reference has not; in the tool's answer this token stands and its log ratio is above 100, exp is inf.
The tool's answer is outside token_mask, but the mask is multiplied on afterwards: inf * 0. (Source: NVIDIA-NeMo/RL, pull request 4120, ClippedPGLossFn and
calculate_kl_penalty_joschu2020.) Heals: where on both log-probs with the mask before the penalty; clamping r at 20.
Does not: nan_to_num in masked_mean or torch.where only in masked_mean (the loss is finite, the gradient is not).
"""

from types import SimpleNamespace

import torch
from torch import nn

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("inf_times_zero_mask",),
    op=("exp",),
    index=(1, 4),
    masked=True,
    role=("kl", "ratio"),
    fix=("mask_before_op", "clamp_exponent", "clamp_input", "where_on_detached"),
    variable=(None,),
    line=("return torch.exp(r) - r - 1",),
)

TOOL = 13


class Policy(nn.Module):
    def __init__(self, vocab=14, dim=16):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.mixer = nn.GRU(dim, dim, batch_first=True)
        self.lm_head = nn.Linear(dim, vocab)

    def forward(self, input_ids):
        return self.lm_head(self.mixer(self.embed(input_ids))[0])


def masked_mean(values, mask, dim=None):
    if dim is None:
        return (values * mask).sum() / (mask.sum() + 1e-8)
    return (values * mask).sum(dim) / (mask.sum(dim) + 1e-8)


def calculate_kl_penalty_joschu2020(logprobs_policy, logprobs_reference):
    r = logprobs_reference - logprobs_policy
    return torch.exp(r) - r - 1


class ClippedPGLossFn:
    def __init__(self, cfg):
        self.ratio_eps_min = cfg["ratio_eps_min"]
        self.ratio_eps_max = cfg["ratio_eps_max"]
        self.reference_policy_kl_penalty = cfg["reference_policy_kl_penalty"]

    def __call__(self, next_token_logits, data):
        token_mask = data["token_mask"][:, 1:]
        sample_mask = data["sample_mask"]
        advantages = data["advantages"][:, 1:]
        prev_logprobs = data["prev_logprobs"][:, 1:]
        reference_policy_logprobs = data["reference_policy_logprobs"][:, 1:]
        mask = token_mask * sample_mask.unsqueeze(-1)

        next_token_logprobs = torch.nn.functional.log_softmax(next_token_logits.to(torch.float32), dim=-1)
        next_tokens = data["input_ids"][:, 1:]
        curr_logprobs = next_token_logprobs[:, :-1].gather(dim=-1, index=next_tokens.unsqueeze(-1)).squeeze(-1)

        kl = self.reference_policy_kl_penalty * calculate_kl_penalty_joschu2020(
            logprobs_policy=curr_logprobs,
            logprobs_reference=reference_policy_logprobs,
        )
        kl = masked_mean(kl, mask)

        ratios = (curr_logprobs - prev_logprobs).exp()
        ratios_clamped = ratios.clamp(1.0 - self.ratio_eps_min, 1.0 + self.ratio_eps_max)
        loss1 = -advantages * ratios
        loss2 = -advantages * ratios_clamped
        actor_loss = masked_mean(torch.max(loss1, loss2), mask)
        return actor_loss + kl


def logprobs_of(model, input_ids):
    with torch.no_grad():
        logprobs = model(input_ids).log_softmax(-1)[:, :-1].gather(-1, input_ids[:, 1:, None]).squeeze(-1)
    return torch.cat([torch.zeros(input_ids.shape[0], 1), logprobs], dim=1)


def build():
    torch.manual_seed(11)
    model = Policy()
    reference = Policy()
    reference.load_state_dict(model.state_dict())
    with torch.no_grad():
        model.lm_head.bias[TOOL] = -118.0
    input_ids = torch.randint(0, 12, (4, 12))
    token_mask = torch.zeros(4, 12)
    token_mask[:, 3:11] = 1
    input_ids[1, 5] = TOOL
    token_mask[1, 5:8] = 0
    sample_mask = torch.tensor([1.0, 1.0, 1.0, 1.0])
    prev = logprobs_of(model, input_ids) + 0.02 * torch.randn(4, 12)
    data = {
        "input_ids": input_ids,
        "token_mask": token_mask,
        "sample_mask": sample_mask,
        "advantages": torch.tensor([0.9, -0.4, 0.3, -0.8])[:, None].expand(4, 12),
        "prev_logprobs": prev,
        "reference_policy_logprobs": logprobs_of(reference, input_ids),
    }
    loss_fn = ClippedPGLossFn({"ratio_eps_min": 0.2, "ratio_eps_max": 0.28, "reference_policy_kl_penalty": 0.01})
    return SimpleNamespace(model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3), data=data, loss_fn=loss_fn)


def run(s=None):
    s = s or build()
    s.optimizer.zero_grad()
    loss = s.loss_fn(s.model(s.data["input_ids"]), s.data)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(s.model.parameters(), 1.0)
    s.optimizer.step()
    return loss


if __name__ == "__main__":
    print(run())
