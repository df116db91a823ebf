"""GRPO on several ranks, in plain PyTorch: a script that knows nothing of nanscope.

    nanscope run -- torchrun --nproc-per-node 2 examples/ddp_grpo.py             # a healthy run
    nanscope run -- torchrun --nproc-per-node 2 examples/ddp_grpo.py --fault     # on the last rank one masked log-prob is stale

The policy learns to write the token 1; a tool writes the sixth token of each response, which the mask keeps out of the loss. What the
loss of one rank makes of a bad token reaches the others with the gradients.
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

ROWS, LENGTH, VOCAB, TOOL, CLIP = 8, 12, 6, 5, 0.2
UPDATES = 2  # optimizer steps on the responses of one rollout


class Policy(nn.Module):
    """A GRU over the tokens so far; returns the logits of the next token. [B, T] -> [B, T, V]"""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, width)
        self.gru = nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, VOCAB)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.gru(self.embed(tokens))[0])


def token_log_probs(policy: nn.Module, tokens: Tensor) -> Tensor:
    """Log-probability of each token after the first. [B, 1 + T] -> [B, T]"""
    log_probs = torch.log_softmax(policy(tokens[:, :-1]), dim=-1)
    return log_probs.gather(-1, tokens[:, 1:, None]).squeeze(-1)


@torch.no_grad()
def rollout(policy: Policy, mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Responses after a start token [B, 1 + T], their log-probs when sampled [B, T], and the advantages of their rewards [B, 1]."""
    tokens = torch.zeros(ROWS, 1, dtype=torch.long)
    for _ in range(LENGTH):
        tokens = torch.cat([tokens, torch.multinomial(policy(tokens)[:, -1].softmax(-1), 1)], dim=1)
    tokens[:, 1 + TOOL] = VOCAB - 1
    rewards = ((tokens[:, 1:] == 1) * mask).sum(dim=1, keepdim=True) / mask.sum(dim=1, keepdim=True)
    return tokens, token_log_probs(policy, tokens), (rewards - rewards.mean()) / (rewards.std() + 1e-4)


def grpo_loss(log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    """PPO's clipped surrogate over the tokens of a batch. All but advantages [B, 1]: [B, T] -> []"""
    ratio = torch.exp(log_probs - old_log_probs)
    surrogate = torch.min(ratio * advantages, torch.clamp(ratio, 1 - CLIP, 1 + CLIP) * advantages)
    return -(surrogate * mask).sum() / mask.sum()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fault", action="store_true", help="the last rank reports one stale log-prob half-way through the run")
    parser.add_argument("--steps", type=int, default=10)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    policy = Policy()
    ddp = DistributedDataParallel(policy)
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-2)
    torch.manual_seed(dist.get_rank())
    mask = torch.ones(ROWS, LENGTH)
    mask[:, TOOL] = 0.0
    for step in range(args.steps):
        if step % UPDATES == 0:
            tokens, old_log_probs, advantages = rollout(policy, mask)
        if args.fault and step == args.steps // 2 and dist.get_rank() == dist.get_world_size() - 1:
            old_log_probs[advantages.argmin(), TOOL] = -200.0
        loss = grpo_loss(token_log_probs(ddp, tokens), old_log_probs, advantages, mask)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if dist.get_rank() == 0:
            print(f"step {step + 1}  loss {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
