"""Watch a GRPO loop in plain PyTorch, without any framework.

    python examples/plain_loop.py              # a healthy run
    python examples/plain_loop.py --fault      # the rollout reports a stale log-prob for one masked token: all weights become NaN

The policy learns to write the token 1. In the middle of each response a tool writes two tokens, which the mask keeps out of the
loss. nanscope sees the calls that make the loss, so the loop need not be changed; `scope.tag` only says what the tensors mean.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import Tensor, nn

import nanscope

ROWS, LENGTH, VOCAB = 8, 12, 6
TOOL = slice(5, 7)  # columns written by the tool
CLIP = 0.2


class Policy(nn.Module):
    """A GRU over the tokens so far; returns the logits of the next token. [B, T] -> [B, T, V]"""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, width)
        self.gru = nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, VOCAB)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.gru(self.embed(tokens))[0])


def token_log_probs(policy: Policy, tokens: Tensor) -> Tensor:
    """Log-probability of each token after the first. [B, 1 + T] -> [B, T]"""
    log_probs = torch.log_softmax(policy(tokens[:, :-1]), dim=-1)
    return log_probs.gather(-1, tokens[:, 1:, None]).squeeze(-1)


@torch.no_grad()
def rollout(policy: Policy) -> tuple[Tensor, Tensor, Tensor]:
    """Responses after a start token, their log-probs when sampled, and which of them the policy wrote itself."""
    tokens = torch.zeros(ROWS, 1, dtype=torch.long)
    for _ in range(LENGTH):
        probs = torch.softmax(policy(tokens)[:, -1], dim=-1)
        tokens = torch.cat([tokens, torch.multinomial(probs, 1)], dim=1)
    tokens[:, 1:][:, TOOL] = VOCAB - 1
    mask = torch.ones(ROWS, LENGTH)
    mask[:, TOOL] = 0.0
    return tokens, token_log_probs(policy, tokens), mask


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fault", action="store_true", help="plant the stale log-prob half-way through the run")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--out", type=Path, default=Path("nanscope-run"), help="folder for what nanscope saves")
    args = parser.parse_args()
    torch.manual_seed(0)
    policy = Policy()
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-2)

    with nanscope.watch(out=args.out) as scope:
        for step in range(args.steps):
            tokens, rollout_log_probs, mask = rollout(policy)
            rewards = ((tokens[:, 1:] == 1) * mask).sum(dim=1) / mask.sum(dim=1)
            advantages = ((rewards - rewards.mean()) / (rewards.std() + 1e-4)).unsqueeze(1)
            if args.fault and step == args.steps // 2:
                rollout_log_probs[advantages.argmax(), TOOL.start] = -200.0

            log_probs = token_log_probs(policy, tokens)
            scope.tag(log_probs=log_probs, mask=mask)
            ratio = torch.exp(log_probs - rollout_log_probs)
            surrogate = torch.min(ratio * advantages, torch.clamp(ratio, 1 - CLIP, 1 + CLIP) * advantages)
            loss = -(surrogate * mask).sum() / mask.sum()  # the mask comes after exp: it hides the overflow, but only forward

            optimizer.zero_grad()
            loss.backward()
            grad_norm = nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
            optimizer.step()
            print(f"step {step:2d}  reward {rewards.mean():.3f}  loss {loss:+.4f}  gradient norm {grad_norm:.4f}")
            if not all(parameter.isfinite().all() for parameter in policy.parameters()):
                break  # no token can be sampled from this policy any more

    print(scope.verdict.sentence)


if __name__ == "__main__":
    main()
