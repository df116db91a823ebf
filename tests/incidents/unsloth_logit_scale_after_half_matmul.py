"""unsloth-zoo, rl_replacements.py, chunked_hidden_states_selective_log_softmax
(https://github.com/unslothai/unsloth-zoo/blob/main/unsloth_zoo/rl_replacements.py): the logits of a Granite-like model are divided by
logit_scale_divide after the product with lm_head. In float16 the product itself exceeds 65504 for a token with a massive activation; the
division and the cast to float32 come too late.

Heals: the product in float32 (or a scaled hidden state before it). Does not heal: the cast to float32 after the product, it is there already.
"""

from types import SimpleNamespace

import torch
import torch.nn as nn

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("fp16_overflow",),
    op=("mm", "matmul"),
    index=(1, 7),
    masked=False,
    role=("logits",),
    fix=("upcast_fp32",),
    variable=("chunk_logits",),
    line=("chunk_logits = chunk_hidden_states.to(lm_head.dtype) @ lm_head.t()",),
)


def chunked_hidden_states_selective_log_softmax(hidden_states, lm_head, index, chunks=2, logit_scale_divide=0.0, temperature=1.0):
    flat_hidden_states = hidden_states.reshape(-1, hidden_states.shape[-1])
    flat_index = index.reshape(-1)
    all_per_token_logps = []
    for chunk_hidden_states, chunk_index in zip(flat_hidden_states.chunk(chunks), flat_index.chunk(chunks)):
        chunk_logits = chunk_hidden_states.to(lm_head.dtype) @ lm_head.t()
        if logit_scale_divide != 0.0:
            chunk_logits = chunk_logits / logit_scale_divide
        chunk_logits = chunk_logits.to(torch.float32)
        if temperature != 1.0:
            chunk_logits = chunk_logits / temperature
        selected_logits = chunk_logits.gather(-1, chunk_index.unsqueeze(-1)).squeeze(-1)
        logsumexp_values = torch.logsumexp(chunk_logits, dim=-1)
        all_per_token_logps.append(selected_logits - logsumexp_values)
    return torch.cat(all_per_token_logps).reshape(index.shape)


class GraniteForCausalLM(nn.Module):
    def __init__(self, vocab=16, dim=8):
        super().__init__()
        self.embed_tokens = nn.Embedding(vocab, dim)
        self.o_proj = nn.Linear(dim, dim, bias=False)
        self.lm_head = nn.Linear(dim, vocab, bias=False)

    def forward(self, input_ids):
        hidden = self.embed_tokens(input_ids)
        return hidden + self.o_proj(hidden)


def grpo_compute_loss(new, old, ref, mask, beta, advantages):
    kl_i = torch.exp(ref - new) - (ref - new) - 1.0
    coef_1 = torch.exp(new - old)
    coef_2 = torch.clamp(coef_1, 0.8, 1.2)
    loss_i = -torch.min(coef_1 * advantages.unsqueeze(1), coef_2 * advantages.unsqueeze(1)) + beta * kl_i
    return (loss_i * mask).sum() / mask.sum().clamp(min=1.0)


def build():
    torch.manual_seed(600)
    model = GraniteForCausalLM()
    with torch.no_grad():
        model.o_proj.weight.mul_(0.1)
        model.embed_tokens.weight[3, 5] = 420.0  # a massive activation channel
        model.lm_head.weight[7, 5] = 190.0
    model.half()
    completion = torch.tensor([[1, 3, 7, 4], [2, 9, 5, 11]])
    old = torch.tensor([[-2.6, -0.1, -2.9], [-2.8, -2.7, -3.0]])
    mask = torch.ones(2, 3)
    mask[1, 2] = 0
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    return SimpleNamespace(
        model=model,
        optimizer=optimizer,
        completion=completion,
        old=old,
        ref=old.clone(),
        mask=mask,
        advantages=torch.tensor([0.7, -0.7]),
        logits_scaling=16.0,
        beta=0.04,
    )


def run(s=None):
    s = s or build()
    hidden_states = s.model(s.completion[:, :-1])
    new = chunked_hidden_states_selective_log_softmax(
        hidden_states, s.model.lm_head.weight, s.completion[:, 1:], logit_scale_divide=s.logits_scaling
    )
    loss = grpo_compute_loss(new, s.old, s.ref, s.mask, s.beta, s.advantages)
    s.optimizer.zero_grad()
    loss.backward()
    s.optimizer.step()
    return loss


if __name__ == "__main__":
    print(run().item())
