"""TRL GRPO, loss_type="cispo" with use_bias_correction_kl: k3 is multiplied by an importance ratio that nobody clamps.

DeepSeek-V3.2's unbiased KL is ratio * k3. The CISPO surrogate only uses a clamped, detached ratio and is safe; the KL term takes the raw one. The
log-probs of the sampling policy come from the engine's top-k-filtered distribution, where a forced token ("</think>" of the thinking budget) was logged
as -99.0. The ratio is exp(97) = inf. In the first step the policy still is the reference, k3 is exactly 0, and inf * 0 is NaN.
Source: https://github.com/huggingface/trl/pull/6503 (bias-corrected KL), https://github.com/THUDM/slime/pull/1004; https://github.com/agentscope-ai/Trinity-RFT/pull/419 clamps the exponent.
Heals: clamp the log ratio before exp (Trinity: +-20).
Does not: clipping the surrogate (it is clipped), clamping the k3 or the product, a smaller beta, exp in float32 (it is).
"""

import copy
from types import SimpleNamespace

import torch
from torch import nn

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("exp_overflow", "inf_times_zero_coef"),
    op=("exp",),
    index=(1, 3),
    masked=False,
    role=("ratio", "is_weight"),
    fix=("clamp_exponent", "clamp_input", "drop_invalid_sample", "fix_upstream"),
    variable=("coef_1",),
    line=("coef_1 = torch.exp(log_ratio)",),
)


class Policy(nn.Module):
    def __init__(self, vocab=40, dim=20):
        super().__init__()
        self.wte = nn.Embedding(vocab, dim)
        self.h = nn.Sequential(nn.Linear(dim, dim), nn.SiLU(), nn.Linear(dim, dim))
        self.lm_head = nn.Linear(dim, vocab)

    def forward(self, ids):
        x = self.wte(ids)
        steps = torch.arange(1, x.shape[1] + 1).view(1, -1, 1)
        return self.lm_head(x + self.h(x.cumsum(1) / steps))


def per_token_logps(model, input_ids, logits_to_keep):
    logits = model(input_ids)[:, -logits_to_keep - 1 : -1]
    return logits.log_softmax(-1).gather(-1, input_ids[:, -logits_to_keep:, None]).squeeze(-1)


class Trainer:
    beta, epsilon_high = 0.04, 5.0

    def __init__(self, model, ref_model, optimizer):
        self.model, self.ref_model, self.optimizer = model, ref_model, optimizer

    def compute_loss(self, inputs):
        mask = inputs["completion_mask"]
        keep = mask.shape[1]
        logps = per_token_logps(self.model, inputs["input_ids"], keep)
        with torch.no_grad():
            ref_logps = per_token_logps(self.ref_model, inputs["input_ids"], keep)

        log_ratio = logps - inputs["old_per_token_logps"]
        coef_1 = torch.exp(log_ratio)
        clamped_ratios = torch.clamp(coef_1, max=self.epsilon_high).detach()
        per_token_loss = -clamped_ratios * inputs["advantages"].unsqueeze(1) * logps

        per_token_kl = torch.exp(ref_logps - logps) - (ref_logps - logps) - 1
        per_token_kl = per_token_kl * coef_1  # bias correction
        per_token_loss = per_token_loss + self.beta * per_token_kl
        return (per_token_loss * mask).sum() / mask.sum().clamp(min=1.0)

    def training_step(self, inputs):
        self.optimizer.zero_grad()
        loss = self.compute_loss(inputs)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        return loss.item()


def build():
    torch.manual_seed(21)
    model = Policy()
    ref_model = copy.deepcopy(model).eval().requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6)
    input_ids = torch.randint(2, 40, (4, 9))
    completion_mask = torch.tensor([[1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 0]]).float()
    with torch.no_grad():
        old = per_token_logps(model, input_ids, 6) + 0.01 * torch.randn(4, 6)
    old[1, 3] = -99.0  # forced by the budget, outside the engine's top-k
    batch = dict(
        input_ids=input_ids, completion_mask=completion_mask, old_per_token_logps=old, advantages=torch.tensor([1.2, 0.3, -0.9, -0.6])
    )
    return SimpleNamespace(model=model, optimizer=optimizer, batch=batch, trainer=Trainer(model, ref_model, optimizer))


def run(s=None):
    s = s or build()
    return [s.trainer.training_step(s.batch) for _ in range(2)]


if __name__ == "__main__":
    print(run())
