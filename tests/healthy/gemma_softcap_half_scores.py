"""Half-precision attention scores overflow to inf for an outlier token, but the tanh soft cap maps inf to the cap with a zero slope."""

from types import SimpleNamespace

import torch
import torch.nn as nn


class SoftcapAttention(nn.Module):
    def __init__(self, dim, softcap=50.0):
        super().__init__()
        self.qk_proj = nn.Linear(dim, dim, bias=False)
        self.v_proj = nn.Linear(dim, dim, bias=False)
        self.softcap = softcap

    def forward(self, hidden_states):
        shared = self.qk_proj(hidden_states)
        scores = torch.bmm(shared, shared.transpose(1, 2))
        scores = self.softcap * torch.tanh(scores / self.softcap)
        future = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        scores = scores.masked_fill(future, float("-inf"))
        probs = scores.float().softmax(-1).to(hidden_states.dtype)
        return torch.bmm(probs, self.v_proj(hidden_states))


class PolicyWithSoftcap(nn.Module):
    def __init__(self, vocab=18, dim=16):
        super().__init__()
        self.embed_tokens = nn.Embedding(vocab, dim)
        self.self_attn = SoftcapAttention(dim)
        self.norm = nn.LayerNorm(dim)
        self.lm_head = nn.Linear(dim, vocab, bias=False)

    def forward(self, input_ids):
        hidden_states = self.embed_tokens(input_ids)
        hidden_states = self.norm(hidden_states + self.self_attn(hidden_states))
        logits = self.lm_head(hidden_states)
        return 30.0 * torch.tanh(logits / 30.0)


def build():
    torch.manual_seed(117)
    model = PolicyWithSoftcap()
    with torch.no_grad():
        model.embed_tokens.weight[0] *= 260.0
    model = model.half()
    input_ids = torch.randint(1, 18, (2, 8))
    input_ids[1, 2] = 0
    batch = {"input_ids": input_ids, "advantages": torch.tensor([0.7, -0.7])}
    return SimpleNamespace(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=1e-3), batch=batch)


def run(s=None):
    s = s or build()
    ids = s.batch["input_ids"]
    logps = s.model(ids[:, :-1]).float().log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)
    loss = -(torch.exp(logps - logps.detach()) * s.batch["advantages"][:, None]).mean() - 0.01 * logps.mean()
    s.optimizer.zero_grad()
    loss.backward()
    s.optimizer.step()
    return loss
