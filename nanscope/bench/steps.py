"""What is trained: a transformer with a GRPO loss, in two sizes, and a policy of a robot with a PPO loss.

work = WORKS["24m"]("cpu")
work.step()                  # loss, backward, clipping, update
work.restore()               # the same weights again, at the same addresses
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

VOCABULARY = 8192
PROMPT, COMPLETION = 16, 64  # tokens
GROUPS, GROUP_SIZE = 2, 4
BETA, CLIP = 0.04, 0.2

OBSERVED, ACTIONS, SAMPLES = 48, 12, 256  # a legged robot: what it senses, its joints, a mini-batch


class TransformerBlock(nn.Module):
    """A pre-norm transformer block. [B, T, D] -> [B, T, D]"""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm, self.feed_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query_key_value, self.attention_out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.feed = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, hidden: Tensor) -> Tensor:
        """Return what the next block is given."""
        rows, length, width = hidden.shape
        split = self.query_key_value(self.attention_norm(hidden)).view(rows, length, 3, self.heads, width // self.heads)
        query, key, value = (part.transpose(1, 2) for part in split.unbind(dim=2))
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self.attention_out(attended.transpose(1, 2).reshape(rows, length, width))
        fed: Tensor = self.feed(self.feed_norm(hidden))
        return hidden + fed


class Transformer(nn.Module):
    """A causal language model: token ids [B, T] -> logits [B, T, V], or [B, 1, V]. The defaults give 24 million parameters."""

    def __init__(self, width: int = 384, layers: int = 10, heads: int = 6) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, width), nn.Embedding(PROMPT + COMPLETION, width)
        self.blocks = nn.ModuleList(TransformerBlock(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, ids: Tensor, last: bool = False) -> Tensor:
        """Return the logits, with `last` those of the last token only."""
        hidden = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            hidden = block(hidden)
        logits: Tensor = self.head(self.norm(hidden[:, -1:] if last else hidden))
        return logits


class ActorCritic(nn.Module):
    """What a robot does, and what that is worth: observations [B, 48] -> means of actions [B, 12], values [B]."""

    def __init__(self) -> None:
        super().__init__()
        self.actor, self.critic = (
            nn.Sequential(nn.Linear(OBSERVED, 256), nn.ELU(), nn.Linear(256, 128), nn.ELU(), nn.Linear(128, returned))
            for returned in (ACTIONS, 1)
        )
        self.log_std = nn.Parameter(torch.zeros(ACTIONS))

    def forward(self, observations: Tensor) -> tuple[Tensor, Tensor]:
        """Return both."""
        return self.actor(observations), self.critic(observations).squeeze(-1)


class Work:
    """A model, its optimizer and one batch; `step` is one step, `restore` goes back to the start. loss: of this batch, each time anew."""

    folder: Path | None = None
    whole = True

    def __init__(self, model: nn.Module, loss: Callable[[], Tensor], device: str, lr: float = 1e-5) -> None:
        self.model, self.loss, self.device = model, loss, device
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
        self.steps = 0
        self._start = self.weights()

    def step(self) -> None:
        """Loss, backward, clipping, update."""
        self.loss().backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.steps += 1

    def weights(self) -> list[Tensor]:
        """Return a copy of the weights."""
        return [parameter.detach().clone() for parameter in self.model.parameters()]

    def restore(self) -> None:
        """Weights as at the start and an optimizer that has seen nothing, without moving either in memory."""
        with torch.no_grad():
            for parameter, start in zip(self.model.parameters(), self._start, strict=True):
                parameter.copy_(start)
        for state in self.optimizer.state.values():
            for tensor in state.values():
                tensor.zero_()


def log_probs_of(model: nn.Module, ids: Tensor) -> Tensor:
    """Return the log-probabilities of the completions' tokens. [B, T]"""
    logits = model(ids)[:, PROMPT - 1 : -1]
    return torch.log_softmax(logits, dim=-1).gather(2, ids[:, PROMPT:, None]).squeeze(2)


def grpo(device: str, width: int = 384, layers: int = 10, heads: int = 6) -> Work:
    """A transformer, and a batch of completions with rewards."""
    torch.manual_seed(0)
    model = Transformer(width, layers, heads).to(device)
    rows = GROUPS * GROUP_SIZE
    ids = torch.randint(0, VOCABULARY, (rows, PROMPT + COMPLETION)).to(device)
    lengths = torch.randint(COMPLETION // 2, COMPLETION + 1, (rows, 1))
    mask = (torch.arange(COMPLETION) < lengths).float().to(device)
    rewards = torch.rand(rows).to(device)
    with torch.no_grad():
        logps = log_probs_of(model, ids)
    old_logps = logps + 0.05 * torch.randn(rows, COMPLETION).to(device)
    ref_logps = logps + 0.10 * torch.randn(rows, COMPLETION).to(device)

    def loss() -> Tensor:
        grouped = rewards.view(GROUPS, GROUP_SIZE)
        advantages = ((grouped - grouped.mean(1, keepdim=True)) / (grouped.std(1, keepdim=True) + 1e-4)).view(-1, 1)
        logps = log_probs_of(model, ids)
        ratio = torch.exp(logps - old_logps)
        clipped_ratio = torch.clamp(ratio, 1 - CLIP, 1 + CLIP)
        per_token_loss = -torch.min(ratio * advantages, clipped_ratio * advantages)
        per_token_kl = torch.exp(ref_logps - logps) - (ref_logps - logps) - 1
        per_token_loss = per_token_loss + BETA * per_token_kl
        return (per_token_loss * mask).sum() / mask.sum()

    return Work(model, loss, device)


def ppo(device: str, around: Callable[[nn.Module], nn.Module] = lambda model: model) -> Work:
    """A small actor and critic, and a mini-batch as a simulator of robots fills it. around: what the model is put into."""
    torch.manual_seed(0)
    model = around(ActorCritic().to(device))
    log_std = next(weight for name, weight in model.named_parameters() if name.endswith("log_std"))
    observations = torch.randn(SAMPLES, OBSERVED).to(device)
    actions = torch.randn(SAMPLES, ACTIONS).to(device)
    advantages, returns, old_values = torch.randn(3, SAMPLES).to(device)

    def scored() -> tuple[torch.distributions.Normal, Tensor, Tensor]:
        means, values = model(observations)
        distribution = torch.distributions.Normal(means, log_std.exp())
        return distribution, distribution.log_prob(actions).sum(-1), values  # type: ignore[no-untyped-call]

    with torch.no_grad():
        old_log_probs = scored()[1] + 0.1 * torch.randn(SAMPLES).to(device)

    def loss() -> Tensor:
        distribution, log_probs, values = scored()
        ratio = torch.exp(log_probs - old_log_probs)
        surrogate: Tensor = -torch.min(ratio * advantages, ratio.clamp(1 - CLIP, 1 + CLIP) * advantages).mean()
        clipped_values = old_values + (values - old_values).clamp(-CLIP, CLIP)
        value_loss = torch.max((values - returns) ** 2, (clipped_values - returns) ** 2).mean()
        entropy: Tensor = distribution.entropy().sum(-1).mean()  # type: ignore[no-untyped-call]
        total: Tensor = surrogate + value_loss - 0.01 * entropy
        return total

    return Work(model, loss, device, lr=1e-3)


WORKS: dict[str, Callable[[str], Work]] = {
    "small": ppo,
    "24m": grpo,
    "150m": partial(grpo, width=896, layers=14, heads=14),
}
