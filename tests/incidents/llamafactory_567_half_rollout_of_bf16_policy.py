"""Policy-gradient step whose rollout worker runs in fp16 a policy that was trained in bf16: one gated product passes 65504.

Cards without bf16 force the inference engine to dtype=half. The weights are synchronised every step and all fit into fp16, but a massive activation
of one answer token does not: silu(gate) * up is inf in the worker's MLP. It computes the old log-probabilities under no_grad; they come back NaN for this token,
the ratio is NaN and with it loss and gradients. The trainer itself (fp32) is finite everywhere.
Source: https://github.com/hiyouga/LlamaFactory/issues/567 (bf16 checkpoint run in fp16 overflows), silu(gate) * up as in LlamaMLP
Heals: the worker in bf16 / fp32; (as T5 does) clamping the product below the fp16 limit. Does not: bounding the ratio (min and clamp hand NaN on), masking prompts, clipping the norm (it becomes NaN).
"""

import copy
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import nn

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("fp16_overflow",),
    op=("mul",),
    index=(1, 2, 3),
    masked=False,
    role=("hidden",),
    fix=("upcast_fp32", "clamp_input"),
    variable=("h",),
    line=("h = self.act(self.gate_proj(x)) * self.up_proj(x)",),
)


class LlamaMLP(nn.Module):
    def __init__(self, hidden, inter):
        super().__init__()
        self.gate_proj = nn.Linear(hidden, inter, bias=False)
        self.up_proj = nn.Linear(hidden, inter, bias=False)
        self.down_proj = nn.Linear(inter, hidden, bias=False)
        self.act = nn.SiLU()

    def forward(self, x):
        h = self.act(self.gate_proj(x)) * self.up_proj(x)
        return self.down_proj(h)


class Policy(nn.Module):
    def __init__(self, vocab=13, hidden=8):
        super().__init__()
        self.embed = nn.Embedding(vocab, hidden)
        self.mlp = LlamaMLP(hidden, 12)
        self.norm = nn.RMSNorm(hidden)
        self.lm_head = nn.Linear(hidden, vocab, bias=False)

    def forward(self, ids):
        x = self.embed(ids)
        return self.lm_head(self.norm(x + self.mlp(x)))


def token_logps(model, ids):
    logits = model(ids)[:, :-1].float()
    return torch.log_softmax(logits, dim=-1).gather(-1, ids[:, 1:, None]).squeeze(-1)


@torch.no_grad()
def sync_weights(policy, worker):
    for p, w in zip(policy.parameters(), worker.parameters()):
        w.copy_(p.to(torch.float16))


def build():
    torch.manual_seed(23)
    policy = Policy()
    with torch.no_grad():
        policy.embed.weight[5] = 0.0
        policy.embed.weight[5, 0] = 40.0  # the massive channel of this token
        policy.mlp.gate_proj.weight[:, 0] *= 0.3
        policy.mlp.gate_proj.weight[3, 0] = 7.5
        policy.mlp.up_proj.weight[3, 0] = 8.0
    worker = copy.deepcopy(policy).half().requires_grad_(False)
    ids = torch.tensor([[1, 2, 3, 4, 6, 7], [8, 9, 5, 10, 11, 12]])
    response_mask = torch.tensor([[0, 0, 1, 1, 1], [0, 0, 1, 1, 1]]).float()
    advantages = torch.tensor([[0.8], [-0.8]])
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-4)
    return SimpleNamespace(
        model=policy, worker=worker, optimizer=optimizer, batch={"input_ids": ids, "response_mask": response_mask, "advantages": advantages}
    )


def run(s=None):
    s = s or build()
    out = []
    for _ in range(2):
        b = s.batch
        sync_weights(s.model, s.worker)
        with torch.no_grad():
            rollout_log_probs = token_logps(s.worker, b["input_ids"])
        log_probs = token_logps(s.model, b["input_ids"])
        ratio = torch.exp(log_probs - rollout_log_probs)
        surr = torch.min(ratio * b["advantages"], ratio.clamp(0.8, 1.2) * b["advantages"])
        loss = -(surr * b["response_mask"]).sum() / b["response_mask"].sum()
        s.optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(s.model.parameters(), 1.0)
        s.optimizer.step()
        out.append(loss.item())
    return out


if __name__ == "__main__":
    print(run())
