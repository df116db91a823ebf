"""Jensen-Shannon divergence of the trainer's and the generator's token log-probs, as NeMo RL logs it, here a regulariser.

The mixture is log(0.5 e^a + 0.5 e^b). For one token that the grammar forced both sides say about -118: both exponentials underflow to 0,
the mixture is log(0) = -inf, and e^a * (a - mixture) is 0 * inf = NaN.

Source: https://github.com/NVIDIA-NeMo/RL/pull/4025 (js_divergence_error; only a metric there).
Heals: torch.logaddexp(a, b) - log 2; a floor or an epsilon that float32 can hold under the logarithm. Does not: masking by the token mask
(the token counts), clamping the divergence at 0.
"""

import math
from types import SimpleNamespace

import torch
from torch import nn

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("log_zero", "plogp_zero"),
    op=("log",),
    index=(1, 2),
    masked=False,
    role=("log_probs", "kl", "hidden"),
    fix=("stable_function", "clamp_input", "representable_eps", "clamp_exponent"),
    variable=("log_mixture",),
    line=("log_mixture = torch.log(0.5 * torch.exp(curr_logprobs) + 0.5 * torch.exp(generation_logprobs))",),
)


def masked_mean(values, mask, global_normalization_factor):
    return torch.sum(values * mask) / (global_normalization_factor + 1e-8)


def js_divergence(curr_logprobs, generation_logprobs):
    log_mixture = torch.log(0.5 * torch.exp(curr_logprobs) + 0.5 * torch.exp(generation_logprobs))
    kl_curr_to_mixture = torch.exp(curr_logprobs) * (curr_logprobs - log_mixture)
    kl_gen_to_mixture = torch.exp(generation_logprobs) * (generation_logprobs - log_mixture)
    return 0.5 * kl_curr_to_mixture + 0.5 * kl_gen_to_mixture


def policy_loss(logits, batch, js_coef=0.02):
    curr_logprobs = logits.log_softmax(-1).gather(-1, batch["next_tokens"].unsqueeze(-1)).squeeze(-1)
    mask = batch["token_mask"] * batch["sample_mask"].unsqueeze(-1)
    valid = mask.sum()
    log_ratio = (curr_logprobs - batch["prev_logprobs"]).clamp(-math.log(1e4), math.log(1e4))
    actor = -(log_ratio.exp() * batch["advantages"])
    divergence = js_divergence(curr_logprobs, batch["generation_logprobs"])
    return masked_mean(actor, mask, valid) + js_coef * masked_mean(divergence, mask, valid)


def build():
    torch.manual_seed(5)
    hidden, vocab = 6, 10
    model = nn.Linear(hidden, vocab)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    states = torch.randn(3, 5, hidden)
    tokens = torch.randint(0, vocab, (3, 5))
    with torch.no_grad():  # a confident state, and a token forced by the JSON grammar
        spread = states[1, 2] @ model.weight.t()
        states[1, 2] *= 118.0 / (spread.max() - spread.min())
        logits = model(states)
        tokens[1, 2] = logits[1, 2].argmin()
        logprobs = logits.log_softmax(-1).gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
    batch = {
        "states": states,
        "next_tokens": tokens,
        "prev_logprobs": logprobs,
        "generation_logprobs": logprobs + 0.01 * torch.randn_like(logprobs),
        "advantages": torch.tensor([[0.7], [-0.2], [-0.5]]),
        "token_mask": torch.tensor([[1.0, 1, 1, 1, 1], [1, 1, 1, 1, 0], [1, 1, 1, 0, 0]]),
        "sample_mask": torch.ones(3),
    }
    return SimpleNamespace(model=model, optimizer=optimizer, batch=batch)


def run(s=None):
    s = s or build()
    for _ in range(2):
        loss = policy_loss(s.model(s.batch["states"]), s.batch)
        s.optimizer.zero_grad()
        loss.backward()
        s.optimizer.step()
    return loss.item()


if __name__ == "__main__":
    print(run())
