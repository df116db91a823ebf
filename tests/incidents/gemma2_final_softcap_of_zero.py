"""Gemma-2 style final logit soft-capping with final_logit_softcapping = 0.0 in the config.

A converted checkpoint writes 0.0 for "no cap" (as llama.cpp, Megatron and vLLM do), the model only asks `is not None`. logits / 0 is
+-inf, tanh saturates at +-1 and times 0 all logits are 0: the loss is a finite log(vocab). In the backward tanh gives 0, and the
division by 0 gives 0 / 0 = NaN for every weight.
Source: https://github.com/huggingface/transformers/blob/main/src/transformers/models/gemma2/modeling_gemma2.py (Gemma2ForCausalLM.forward).
Heals: treating 0 as "off", or rejecting the config. Does not: a floor under the cap (1e-6): the logits are all alike, the tanh is saturated,
every gradient is 0 and nothing learns; nor clipping of gradients.
"""

from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F

from expected import Expected

EXPECTED = Expected(
    phase=("backward",),
    cause=("zero_denominator",),
    op=("div",),
    index=(0, 0, 0),
    masked=None,
    role=("logits",),
    fix=("skip_disabled_term", "validate_config", "avoid_singular_op", "fix_upstream"),
    variable=("logits",),
    line=("logits = logits / self.config.final_logit_softcapping",),
)


class RMSNorm(nn.Module):
    def __init__(self, dim, eps=1e-6):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.zeros(dim))

    def forward(self, x):
        output = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + self.eps)
        return output * (1.0 + self.weight)


class DecoderLayer(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.input_layernorm = RMSNorm(dim)
        self.gate_proj = nn.Linear(dim, 2 * dim, bias=False)
        self.up_proj = nn.Linear(dim, 2 * dim, bias=False)
        self.down_proj = nn.Linear(2 * dim, dim, bias=False)

    def forward(self, x):
        h = self.input_layernorm(x)
        return x + self.down_proj(F.gelu(self.gate_proj(h), approximate="tanh") * self.up_proj(h))


class ForCausalLM(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(config.hidden_size) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def forward(self, input_ids):
        hidden_states = self.embed_tokens(input_ids) * self.config.hidden_size**0.5
        for layer in self.layers:
            hidden_states = layer(hidden_states)
        logits = self.lm_head(self.norm(hidden_states))
        if self.config.final_logit_softcapping is not None:
            logits = logits / self.config.final_logit_softcapping
            logits = torch.tanh(logits)
            logits = logits * self.config.final_logit_softcapping
        return logits


def build():
    torch.manual_seed(2)
    config = SimpleNamespace(vocab_size=32, hidden_size=16, num_hidden_layers=2, final_logit_softcapping=0.0)
    model = ForCausalLM(config)
    input_ids = torch.randint(0, 32, (2, 8))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    return SimpleNamespace(model=model, optimizer=optimizer, input_ids=input_ids, config=config)


def run(s=None):
    s = s or build()
    logits = s.model(s.input_ids)
    loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), s.input_ids[:, 1:].flatten())
    s.optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(s.model.parameters(), 1.0)
    s.optimizer.step()
    return loss
