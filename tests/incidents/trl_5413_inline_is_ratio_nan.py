"""Tool tokens that vLLM could not score carry NaN, and the sequence-level ratio masks them by multiplying the difference with zero.
https://github.com/huggingface/trl/pull/5413
"""

from types import SimpleNamespace

import torch
import torch.nn as nn

from expected import Expected

EXPECTED = Expected(
    phase=("input",),
    cause=("nan_times_zero_mask", "bad_input"),
    op=("sub",),
    index=(1, 2),
    masked=True,
    role=("rollout_log_probs",),
    fix=("mask_before_op", "reject_input", "drop_invalid_sample"),
    variable=("sampling_per_token_logps",),
    line=('per_token_logps_diff = (old_per_token_logps - inputs["sampling_per_token_logps"]) * mask',),
)


class Trainer:
    def __init__(self, model, vllm_importance_sampling_mode="sequence_truncate", cap=2.0):
        self.model = model
        self.vllm_importance_sampling_mode = vllm_importance_sampling_mode
        self.cap = cap

    def _get_per_token_logps(self, input_ids, keep):
        logits = self.model(input_ids)[:, :-1]
        logps = logits.log_softmax(-1).gather(-1, input_ids[:, 1:].unsqueeze(-1)).squeeze(-1)
        return logps[:, -keep:]

    def _compute_loss(self, inputs):
        mask = inputs["completion_mask"] * inputs["tool_mask"]
        per_token_logps = self._get_per_token_logps(inputs["input_ids"], mask.size(1))
        old_per_token_logps = per_token_logps.detach()
        per_token_logps_diff = (old_per_token_logps - inputs["sampling_per_token_logps"]) * mask
        if self.vllm_importance_sampling_mode.startswith("sequence"):
            logps_diff = per_token_logps_diff.sum(dim=-1, keepdim=True)
        else:
            logps_diff = per_token_logps_diff
        importance_sampling_ratio = torch.clamp(torch.exp(logps_diff), max=self.cap)
        coef = torch.exp(per_token_logps - old_per_token_logps)
        per_token_loss = -coef * inputs["advantages"].unsqueeze(1) * importance_sampling_ratio
        return (per_token_loss * mask).sum() / mask.sum().clamp(min=1.0)


def build():
    torch.manual_seed(5413)
    model = nn.Sequential(nn.Embedding(17, 8), nn.Linear(8, 8), nn.SiLU(), nn.Linear(8, 17))
    input_ids = torch.randint(0, 17, (3, 10))
    completion_mask = torch.ones(3, 6, dtype=torch.long)
    completion_mask[2, 4:] = 0
    tool_mask = torch.ones(3, 6, dtype=torch.long)
    tool_mask[1, 2:4] = 0
    with torch.no_grad():
        sampling = Trainer(model)._get_per_token_logps(input_ids, 6) + 0.01 * torch.randn(3, 6)
    sampling[1, 2:4] = float("nan")
    batch = dict(
        input_ids=input_ids,
        completion_mask=completion_mask,
        tool_mask=tool_mask,
        sampling_per_token_logps=sampling,
        advantages=torch.tensor([0.7, -1.3, 0.6]),
    )
    return SimpleNamespace(model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-6), batch=batch, trainer=Trainer(model))


def run(s=None):
    s = s or build()
    loss = s.trainer._compute_loss(s.batch)
    loss.backward()
    s.optimizer.step()
    s.optimizer.zero_grad()
    return loss
