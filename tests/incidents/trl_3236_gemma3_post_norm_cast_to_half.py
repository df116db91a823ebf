"""Gemma-3 in fp16 under DPO: its RMSNorm works in fp32 and casts the result back. The gain behind the MLP is huge in one channel, the normalised
value times (1 + weight) is about 80000, fits fp32 and becomes inf in the cast to fp16. The next norm makes inf * rsqrt(inf) = NaN of it and the
rewards are NaN ("loss=0, grad_norm=0, reward=nan" in the logs).

Source: https://github.com/huggingface/trl/issues/3236 (reward becomes nan when switching from full precision to fp16 for gemma3-12b-it).
Heals: fp32 (or bf16) activations, or a clamp to the range of fp16 before the cast. Upcasting the logits before log_softmax does not.
"""

from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("fp16_overflow",),
    op=("to", "_to_copy", "type_as", "half"),
    index=(1, 4, 3),
    masked=None,
    role=("hidden",),
    fix=("upcast_fp32", "clamp_input"),
    variable=("hidden_states", None),
    line=("return output.type_as(x)",),
)


class RMSNorm(nn.Module):
    def __init__(self, dim, eps=1e-6):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.zeros(dim))

    def forward(self, x):
        output = x.float()
        output = output * torch.rsqrt(output.pow(2).mean(-1, keepdim=True) + self.eps)
        output = output * (1.0 + self.weight.float())
        return output.type_as(x)


class DecoderLayer(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.pre_feedforward_layernorm = RMSNorm(dim)
        self.gate_proj = nn.Linear(dim, 2 * dim, bias=False)
        self.up_proj = nn.Linear(dim, 2 * dim, bias=False)
        self.down_proj = nn.Linear(2 * dim, dim, bias=False)
        self.post_feedforward_layernorm = RMSNorm(dim)

    def forward(self, hidden_states):
        residual = hidden_states
        hidden_states = self.pre_feedforward_layernorm(hidden_states)
        hidden_states = self.down_proj(F.gelu(self.gate_proj(hidden_states)) * self.up_proj(hidden_states))
        hidden_states = self.post_feedforward_layernorm(hidden_states)
        return residual + hidden_states


class GemmaLike(nn.Module):
    def __init__(self, vocab=20, dim=16):
        super().__init__()
        self.embed_tokens = nn.Embedding(vocab, dim)
        self.layer = DecoderLayer(dim)
        self.norm = RMSNorm(dim)
        self.lm_head = nn.Linear(dim, vocab, bias=False)

    def forward(self, ids):
        hidden = self.embed_tokens(ids) * self.embed_tokens.weight.shape[1] ** 0.5
        return self.lm_head(self.norm(self.layer(hidden)))


def sequence_logps(model, ids):
    logits = model(ids[:, :-1]).float()
    return logits.log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1).sum(-1)


def build():
    torch.manual_seed(3236)
    model = GemmaLike()
    ids = torch.randint(0, 19, (4, 8))
    ids[1, 4] = 19
    with torch.no_grad():
        # a delimiter token drives one channel of the MLP, and that channel carries the massive gain
        layer = model.layer
        model.embed_tokens.weight[:, 0] = 0.0
        model.embed_tokens.weight[19] = 0.0
        model.embed_tokens.weight[19, 0] = 4.0
        layer.gate_proj.weight[5], layer.up_proj.weight[5] = 0.0, 0.0
        layer.gate_proj.weight[5, 0], layer.up_proj.weight[5, 0] = 3.0, 3.0
        layer.down_proj.weight[3] = 0.0
        layer.down_proj.weight[3, 5] = 4.0
        layer.post_feedforward_layernorm.weight[3] = 22000.0
    model = model.to(torch.float16)
    return SimpleNamespace(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=1e-6),
        chosen=ids[:2],
        rejected=ids[2:],
        ref_chosen=torch.tensor([-22.0, -24.0]),
        ref_rejected=torch.tensor([-23.0, -21.5]),
    )


def run(s=None, beta=0.1):
    s = s or build()
    policy_logps = sequence_logps(s.model, torch.cat([s.chosen, s.rejected]))
    chosen_rewards = beta * (policy_logps[:2] - s.ref_chosen)
    rejected_rewards = beta * (policy_logps[2:] - s.ref_rejected)
    loss = -F.logsigmoid(chosen_rewards - rejected_rewards).mean()
    s.optimizer.zero_grad()
    loss.backward()
    s.optimizer.step()
    return loss


if __name__ == "__main__":
    print("loss", run().item())
