"""A small RLOO run that logs to W&B, and whose loss spikes in step 9: a script that knows nothing of nanscope.

    WANDB_MODE=offline python examples/wandb_rloo.py           # as it is: the chart spikes, and the policy is lost
    WANDB_MODE=offline nanscope run examples/wandb_rloo.py     # the same, watched: docs/tutorial.md

The policy is trained on recorded responses, five to a prompt. A judge gives three scores to each and adds them up in the order in which
they come, so that equal totals are not always equal to the last bit.
"""

from __future__ import annotations

import torch
import wandb
from torch import Tensor, nn

STEPS, PROMPTS, SAMPLES, LENGTH, VOCAB = 12, 3, 5, 8, 17
LEARNING_RATE = 0.05


def recorded() -> tuple[Tensor, Tensor]:
    """Responses [S, P, G, 1 + T] and their rewards [S, P, G]."""
    tokens = torch.randint(0, VOCAB, (STEPS, PROMPTS, SAMPLES, 1 + LENGTH))
    rewards = torch.rand(STEPS, PROMPTS, SAMPLES)
    style, layout, answer, too_long = torch.tensor([0.1, 0.2, 0.4, -0.001])
    full = [style + layout + answer, style + answer + layout, layout + answer + style, style + answer + layout]
    rewards[8, 1] = torch.stack([*full[:3], full[0] + too_long, full[3]])  # all are right, and one is a token too long
    return tokens, rewards


def advantages_of(rewards: Tensor) -> Tensor:
    """How far each reward is from those of its siblings, in their standard deviations. [P, G] -> [P, G]"""
    keep = ~torch.eye(SAMPLES, dtype=torch.bool)
    siblings = rewards[:, None, :].expand(-1, SAMPLES, -1)[:, keep].view(-1, SAMPLES, SAMPLES - 1)
    spread = siblings.std(dim=-1)
    return (rewards - siblings.mean(dim=-1)) / spread


def main() -> None:
    torch.manual_seed(0)
    policy = nn.Sequential(nn.Embedding(VOCAB, 16), nn.Linear(16, VOCAB))
    optimizer = torch.optim.SGD(policy.parameters(), lr=LEARNING_RATE)
    with wandb.init(project="rloo", settings=wandb.Settings(silent=True)) as run:
        for step, (tokens, rewards) in enumerate(zip(*recorded(), strict=True), start=1):
            log_probs = policy(tokens[..., :-1]).log_softmax(-1).gather(-1, tokens[..., 1:, None]).squeeze(-1)
            loss = -(advantages_of(rewards) * log_probs.mean(-1)).mean()
            optimizer.zero_grad()
            loss.backward()
            grad_norm = nn.utils.clip_grad_norm_(policy.parameters(), float("inf"), error_if_nonfinite=False)
            optimizer.step()
            run.log({"loss": loss.item(), "grad_norm": grad_norm.item()})
            print(f"step {step:>2}  loss {loss.item():>12.4g}  grad_norm {grad_norm.item():>10.4g}")


if __name__ == "__main__":
    main()
