"""Importance-weighted policy gradient on a packed row; the temperature of each token is replayed from the rollout.

Two of the three packed rollouts were sampled at 1.0 and 0.7; the environment of the middle one asks for greedy decoding (temperature = 0, accepted by
the config, which only says ge=0). The trainer rescales the logits by the recorded temperature: x / 0 = inf, log_softmax of it is NaN.

Source: https://github.com/PrimeIntellect-ai/prime-rl/pull/3090 (reject train-sampling temperature=0); slime #2197 meets the same.
Heals: temperature > 0 in the config (or 0 read as 1, "untempered"), a floor under the temperature.  Does not: clipping the ratio, a clamp of the log-probs, fp64.
"""

from types import SimpleNamespace

import torch
import torch.nn as nn

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("zero_denominator",),
    op=("div",),
    index=(0, 6, 0),
    masked=False,
    role=("logits",),
    fix=(
        "validate_config",
        "clamp_denominator",
        "drop_invalid_sample",
        "reject_input",
        "fix_upstream",
        "where_on_detached",
        "avoid_singular_op",
    ),
    variable=("scaled_logits",),
    line=("scaled_logits = logits / temperatures.unsqueeze(-1)",),
)

SAMPLING = [dict(tokens=6, temperature=1.0), dict(tokens=5, temperature=0.0), dict(tokens=7, temperature=0.7)]


class CausalLM(nn.Module):
    def __init__(self, vocab=40, dim=24):
        super().__init__()
        self.embed_tokens = nn.Embedding(vocab, dim)
        self.mlp = nn.Sequential(nn.Linear(dim, dim), nn.SiLU(), nn.Linear(dim, dim))
        self.lm_head = nn.Linear(dim, vocab, bias=False)

    def forward(self, input_ids):
        x = self.embed_tokens(input_ids)
        return self.lm_head(x + self.mlp(x))


def selective_log_softmax(logits, index):
    return torch.gather(logits.log_softmax(dim=-1), -1, index.unsqueeze(-1)).squeeze(-1)


def compute_loss(trainer_logprobs, inference_logprobs, advantages, loss_mask):
    log_importance_ratio = trainer_logprobs - inference_logprobs
    importance_ratio = torch.exp(log_importance_ratio.clamp(max=20.0))
    pg_loss = -(advantages * importance_ratio)
    return pg_loss[loss_mask].sum() / loss_mask.sum()


def build():
    torch.manual_seed(3090)
    model = CausalLM()
    total = sum(r["tokens"] for r in SAMPLING)
    input_ids = torch.randint(0, 40, (1, total))
    targets = torch.randint(0, 40, (1, total))
    temperatures = torch.cat([torch.full((r["tokens"],), r["temperature"]) for r in SAMPLING])[None]
    advantages = torch.cat([torch.full((r["tokens"],), a) for r, a in zip(SAMPLING, (0.8, -0.5, 0.3))])[None]
    loss_mask = torch.ones(1, total, dtype=torch.bool)
    loss_mask[0, 0] = loss_mask[0, 11] = False
    with torch.no_grad():
        inference_logprobs = selective_log_softmax(model(input_ids), targets)
    batch = dict(
        input_ids=input_ids,
        targets=targets,
        temperatures=temperatures,
        advantages=advantages,
        loss_mask=loss_mask,
        inference_logprobs=inference_logprobs,
    )
    return SimpleNamespace(model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3), batch=batch)


def run(s=None):
    s = s or build()
    b = s.batch
    logits = s.model(b["input_ids"])
    temperatures = b["temperatures"]
    scaled_logits = logits / temperatures.unsqueeze(-1)
    trainer_logprobs = selective_log_softmax(scaled_logits, b["targets"])
    loss = compute_loss(trainer_logprobs, b["inference_logprobs"], b["advantages"], b["loss_mask"])
    s.optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(s.model.parameters(), 1.0)
    s.optimizer.step()
    return loss.item()


if __name__ == "__main__":
    print(run())
