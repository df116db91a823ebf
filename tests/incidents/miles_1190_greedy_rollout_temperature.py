"""radixark/miles, get_responses - rollout_temperature 0 (greedy) reaches the trainer.

The trainer divides its logits by the temperature of the rollout to score the tokens under the sampler's distribution. With 0 each logit becomes +-inf and log_softmax NaN.
(Source: radixark/miles PR 1190, backends/training_utils/loss_hub/logit_processors.py, get_responses.) Heals: dividing only if the temperature is > 0 (the PR); refusing
the setting; a floor under the temperature (max(T, 1e-3), another distribution but finite). Does not: nan_to_num of the log-probs (finite loss, NaN in the gradient).
"""

from argparse import Namespace
from types import SimpleNamespace

import torch
import torch.nn as nn

from expected import Expected

EXPECTED = Expected(
    phase=("forward",),
    cause=("zero_denominator",),
    op=("div", "truediv", "true_divide", "/"),
    index=None,
    masked=None,
    role=("logits",),
    fix=("validate_config", "avoid_singular_op", "skip_disabled_term", "clamp_denominator", "representable_eps", "fix_upstream"),
    variable=("logits",),
    line=("logits = logits.div(args.rollout_temperature)",),
)


class Actor(nn.Module):
    def __init__(self, vocab=19, dim=16):
        super().__init__()
        self.embedding = nn.Embedding(vocab, dim)
        self.decoder = nn.GRU(dim, dim, batch_first=True)
        self.output_layer = nn.Linear(dim, vocab)

    def forward(self, tokens):
        return self.output_layer(self.decoder(self.embedding(tokens))[0])


def get_responses(logits, *, args, unconcat_tokens, total_lengths, response_lengths):
    assert logits.dtype == torch.float32, f"{logits.dtype}"
    assert logits.size(0) == 1, f"{logits.shape}"
    logits = logits.squeeze(0)
    logits = logits.div(args.rollout_temperature)

    end = 0
    for tokens, total_length, response_length in zip(unconcat_tokens, total_lengths, response_lengths, strict=False):
        end += total_length
        start = end - response_length
        logits_chunk = logits[start - 1 : end - 1]
        tokens_chunk = tokens[-response_length:]
        yield logits_chunk, tokens_chunk


def get_log_probs(logits, **kwargs):
    log_probs_list = []
    for logits_chunk, tokens_chunk in get_responses(logits, **kwargs):
        log_probs = torch.log_softmax(logits_chunk, dim=-1)
        log_probs_list.append(log_probs.gather(-1, tokens_chunk.unsqueeze(-1)).squeeze(-1))
    return log_probs_list


def build():
    torch.manual_seed(1190)
    args = Namespace(rollout_temperature=0.0, eps_clip=0.2, eps_clip_high=0.28)
    model = Actor()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    total_lengths, response_lengths = [9, 7, 11], [5, 4, 6]
    unconcat_tokens = [torch.randint(0, 19, (n,)) for n in total_lengths]
    with torch.no_grad():
        full = torch.log_softmax(model(torch.cat(unconcat_tokens).unsqueeze(0)).squeeze(0), dim=-1)
    rollout_log_probs, end = [], 0
    for tokens, n, r in zip(unconcat_tokens, total_lengths, response_lengths):
        end += n
        rollout_log_probs.append(full[end - r - 1 : end - 1].gather(-1, tokens[-r:].unsqueeze(-1)).squeeze(-1))
    batch = dict(
        unconcat_tokens=unconcat_tokens,
        total_lengths=total_lengths,
        response_lengths=response_lengths,
        rollout_log_probs=rollout_log_probs,
        rewards=torch.tensor([1.0, -1.0, 0.5]),
    )
    return SimpleNamespace(model=model, optimizer=optimizer, args=args, batch=batch)


def policy_loss_function(args, batch, logits):
    log_probs = get_log_probs(
        logits,
        args=args,
        unconcat_tokens=batch["unconcat_tokens"],
        total_lengths=batch["total_lengths"],
        response_lengths=batch["response_lengths"],
    )
    log_probs = torch.cat(log_probs, dim=0)
    old_log_probs = torch.cat(batch["rollout_log_probs"], dim=0)
    advantages = torch.cat([r.expand(n) for r, n in zip(batch["rewards"], batch["response_lengths"])])
    ppo_kl = old_log_probs - log_probs
    ratio = (-ppo_kl).exp()
    pg_losses1 = -ratio * advantages
    pg_losses2 = -ratio.clamp(1 - args.eps_clip, 1 + args.eps_clip_high) * advantages
    return torch.maximum(pg_losses1, pg_losses2).mean()


def run(s=None):
    s = s or build()
    tokens = torch.cat(s.batch["unconcat_tokens"]).unsqueeze(0)
    loss = policy_loss_function(s.args, s.batch, s.model(tokens))
    s.optimizer.zero_grad()
    loss.backward()
    s.optimizer.step()
    return loss


if __name__ == "__main__":
    print(run())
