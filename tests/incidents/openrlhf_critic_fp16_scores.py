"""The critic runs in float16 and scales attention scores after the matmul, so an outlier token's q.k product exceeds 65504."""

from types import SimpleNamespace

import torch
import torch.nn as nn

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("fp16_overflow",),
    op=("bmm", "matmul"),
    index=(1, 3, 3),
    masked=False,
    role=("attention",),
    fix=("upcast_fp32", "clamp_input"),
    variable=("attn_scores",),
    line=("attn_scores = torch.bmm(query, key.transpose(1, 2))",),
)


class CriticAttention(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.q_proj = nn.Linear(dim, dim, bias=False)
        self.k_proj = nn.Linear(dim, dim, bias=False)
        self.v_proj = nn.Linear(dim, dim, bias=False)
        self.scale = dim**-0.5

    def forward(self, hidden_states):
        query, key, value = self.q_proj(hidden_states), self.k_proj(hidden_states), self.v_proj(hidden_states)
        attn_scores = torch.bmm(query, key.transpose(1, 2))
        attn_scores = attn_scores * self.scale
        causal = torch.ones(attn_scores.shape[-2:], dtype=torch.bool).triu(1)
        attn_scores = attn_scores.masked_fill(causal, torch.finfo(attn_scores.dtype).min)
        return torch.bmm(attn_scores.softmax(-1), value)


class CriticModel(nn.Module):
    def __init__(self, vocab=25, dim=16):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.attn = CriticAttention(dim)
        self.norm = nn.LayerNorm(dim)
        self.value_head = nn.Linear(dim, 1)

    def forward(self, sequences):
        hidden_states = self.embed(sequences)
        hidden_states = self.norm(hidden_states + self.attn(hidden_states))
        return self.value_head(hidden_states).squeeze(-1)


class ValueLoss(nn.Module):
    def __init__(self, clip_eps=None):
        super().__init__()
        self.clip_eps = clip_eps

    def forward(self, values, old_values, returns, action_mask):
        values_clipped = old_values + (values - old_values).clamp(-self.clip_eps, self.clip_eps)
        surr1 = (values_clipped - returns) ** 2
        surr2 = (values - returns) ** 2
        loss = torch.max(surr1, surr2)
        return 0.5 * ((loss * action_mask).sum(-1) / action_mask.sum(-1)).mean()


def build():
    torch.manual_seed(109)
    critic = CriticModel()
    sequences = torch.randint(1, 25, (3, 7))
    sequences[1, 3] = 0
    with torch.no_grad():
        critic.attn.k_proj.weight.copy_(critic.attn.q_proj.weight + 0.05 * torch.randn(16, 16))
        critic.embed.weight[0] *= 230.0
    critic = critic.half()
    action_mask = torch.ones(3, 7)
    action_mask[:, :2] = 0
    experience = {
        "sequences": sequences,
        "values": 0.1 * torch.randn(3, 7),
        "returns": torch.rand(3, 7),
        "action_mask": action_mask,
    }
    optimizer = torch.optim.SGD(critic.parameters(), lr=1e-3)
    return SimpleNamespace(model=critic, optimizer=optimizer, batch=experience, loss_fn=ValueLoss(clip_eps=0.5))


def run(s=None):
    s = s or build()
    e = s.batch
    values = s.model(e["sequences"]).float()
    loss = s.loss_fn(values, e["values"], e["returns"], action_mask=e["action_mask"])
    s.optimizer.zero_grad()
    loss.backward()
    s.optimizer.step()
    return loss
