"""A float16 RMSNorm with eps=1e-8 (rounds to 0) takes rsqrt(0) on zeroed padding rows; no loss token sees it, the gradient does."""

from types import SimpleNamespace

import torch
import torch.nn as nn

from expected import Expected

EXPECTED = Expected(
    phase=("backward", "forward"),
    cause=("eps_underflow", "where_grad_trap"),
    op=("rsqrt",),
    index=(0, 6, 0),
    masked=True,
    role=("hidden",),
    fix=("upcast_fp32", "clamp_denominator", "clamp_input", "representable_eps"),
    variable=("inv_rms",),
    line=("inv_rms = torch.rsqrt(variance + self.eps)",),
)


class RMSNorm(nn.Module):
    def __init__(self, dim, eps=1e-8):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, hidden_states):
        variance = hidden_states.pow(2).mean(-1, keepdim=True)
        inv_rms = torch.rsqrt(variance + self.eps)
        return self.weight * (hidden_states * inv_rms)


class PolicyModel(nn.Module):
    def __init__(self, vocab=18, dim=12):
        super().__init__()
        self.embed_tokens = nn.Embedding(vocab, dim)
        self.norm = RMSNorm(dim)
        self.up_proj = nn.Linear(dim, 2 * dim)
        self.down_proj = nn.Linear(2 * dim, dim)
        self.lm_head = nn.Linear(dim, vocab, bias=False)

    def forward(self, input_ids, attention_mask):
        hidden_states = self.embed_tokens(input_ids) * attention_mask.unsqueeze(-1)
        hidden_states = hidden_states + self.down_proj(torch.relu(self.up_proj(self.norm(hidden_states))))
        return self.lm_head(hidden_states)


def clipped_pg_loss(curr_logprobs, prev_logprobs, advantages, ratio_clip_min=0.2, ratio_clip_max=0.2):
    ratios = (curr_logprobs - prev_logprobs).exp()
    ratios_clamped = ratios.clamp(1.0 - ratio_clip_min, 1.0 + ratio_clip_max)
    return torch.max(-advantages * ratios, -advantages * ratios_clamped).mean()


def selected_logprobs(model, data):
    keep = data["token_mask"].bool()
    logits = model(data["input_ids"], data["attention_mask"])[:, :-1][keep].float()
    targets = data["input_ids"][:, 1:][keep]
    return logits.log_softmax(-1).gather(-1, targets[:, None]).squeeze(-1)


def build():
    torch.manual_seed(103)
    model = PolicyModel().half()
    input_ids = torch.randint(0, 18, (3, 9))
    attention_mask = torch.ones(3, 9, dtype=torch.float16)
    attention_mask[0, 6:] = 0
    attention_mask[2, 8:] = 0
    token_mask = attention_mask[:, 1:].clone()
    token_mask[:, :2] = 0
    data = {"input_ids": input_ids, "attention_mask": attention_mask, "token_mask": token_mask}
    advantages = torch.tensor([0.8, -0.3, -0.5])[:, None].expand(3, 8)
    data["advantages"] = advantages[token_mask.bool()]
    with torch.no_grad():
        data["prev_logprobs"] = selected_logprobs(model, data)
    return SimpleNamespace(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=1e-3), batch=data)


def run(s=None):
    s = s or build()
    s.optimizer.zero_grad()
    curr_logprobs = selected_logprobs(s.model, s.batch)
    loss = clipped_pg_loss(curr_logprobs, s.batch["prev_logprobs"], s.batch["advantages"])
    loss.backward()
    s.optimizer.step()
    return loss
