"""`chunked_hidden_states_selective_log_softmax` of unsloth-zoo's GRPO path on a float16 Gemma: the projection overflows before the cast.

The hidden states of the last layer reach some hundreds to thousands, the lm_head is half too. One logit is beyond 65504, so the product is inf;
`.to(torch.float32)` comes one line too late, logsumexp is inf, and inf - inf or -inf log-probs go into the loss.

Source: https://github.com/unslothai/unsloth-zoo/pull/599 (logit_matmul_upcast), unsloth_zoo/rl_replacements.py.
Heals: both factors in float32 before the matmul. Does not: casting the product, nor the divisions by a temperature after it.
"""

from types import SimpleNamespace

import torch
from torch import nn

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("fp16_overflow",),
    op=("mm", "matmul"),
    index=(2, 5),
    masked=False,
    role=("logits",),
    fix=("upcast_fp32",),
    variable=("chunk_logits",),
    line=("chunk_logits = chunk_hidden_states.to(lm_head.dtype) @ lm_head.t()",),
)


def chunked_hidden_states_selective_log_softmax(hidden_states, lm_head, index, chunks=2, temperature=1.0):
    flat_hidden_states = hidden_states.reshape(-1, hidden_states.shape[-1])
    flat_index = index.reshape(-1)
    all_per_token_logps = []
    for chunk_hidden_states, chunk_index in zip(flat_hidden_states.chunk(chunks), flat_index.chunk(chunks)):
        chunk_logits = chunk_hidden_states.to(lm_head.dtype) @ lm_head.t()
        chunk_logits = chunk_logits.to(torch.float32) / temperature
        selected_logits = torch.gather(chunk_logits, dim=-1, index=chunk_index.unsqueeze(-1)).squeeze(-1)
        logsumexp_values = torch.logsumexp(chunk_logits, dim=-1)
        all_per_token_logps.append(selected_logits - logsumexp_values)
    return torch.cat(all_per_token_logps).reshape(index.shape)


class Gemma(nn.Module):
    def __init__(self, hidden=16, vocab=24):
        super().__init__()
        self.embed_tokens = nn.Embedding(vocab, hidden)
        self.adapter = nn.Linear(hidden, hidden, bias=False)  # the LoRA delta that is trained, in float32
        self.norm_weight = nn.Parameter(torch.full((hidden,), 60.0), requires_grad=False)
        self.register_buffer("lm_head", torch.randn(vocab, hidden) * 0.5)

    def forward(self, ids):
        x = self.embed_tokens(ids)
        x = x + self.adapter(x)
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
        return (x * self.norm_weight).to(torch.float16)


def build():
    torch.manual_seed(4)
    model = Gemma()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    ids = torch.randint(0, 24, (2, 5))
    with torch.no_grad():  # an outlier row of the tied head that one state meets head-on
        state = model(ids)[1, 2].float()
        model.lm_head[5] = state / state.norm() * 300.0
    model.lm_head = model.lm_head.half()
    batch = {
        "ids": ids,
        "targets": torch.randint(0, 24, (2, 5)),
        "advantages": torch.tensor([[0.6], [-0.6]]),
        "completion_mask": torch.ones(2, 5),
    }
    return SimpleNamespace(model=model, optimizer=optimizer, batch=batch)


def run(s=None):
    s = s or build()
    b = s.batch
    for _ in range(2):
        logps = chunked_hidden_states_selective_log_softmax(s.model(b["ids"]), s.model.lm_head, b["targets"])
        coef = torch.exp(logps - logps.detach())
        loss = -(coef * b["advantages"] * b["completion_mask"]).sum() / b["completion_mask"].sum()
        s.optimizer.zero_grad()
        loss.backward()
        s.optimizer.step()
    return loss.item()


if __name__ == "__main__":
    print(run())
