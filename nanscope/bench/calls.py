"""What nanscope adds where tensors cost next to nothing: to a recorded call, a backward pass, an optimizer's step, a sampled token."""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from nanscope.bench.measure import Figures, Quartiles, Seconds, compared, rotated, seconds_of
from nanscope.bench.steps import BETA, CLIP, COMPLETION, GROUP_SIZE, GROUPS, PROMPT, VOCABULARY, Transformer
from nanscope.bench.tools import BARE, NANSCOPE
from nanscope.errors import NanscopeError
from nanscope.torch_inside import TorchDispatchMode
from nanscope.watching.scope import Scope, watch

LOSSES = 50  # steps of a round
PARTS = ("forward", "backward", "optimizer")


@contextlib.contextmanager
def maybe_watched(variant: str) -> Iterator[Scope | None]:
    """Watch, if the variant is nanscope."""
    if variant != NANSCOPE:
        yield None
        return
    with tempfile.TemporaryDirectory() as folder, watch(out=folder, deep_every=0) as scope:
        yield scope


class CallsMade(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts aten calls."""

    many = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Count one, and make it."""
        self.many += 1
        return func(*args, **(kwargs or {}))


# -- calls -------------------------------------------------------------------------------------------------------------------------------


class Scores(nn.Module):
    """Stands for a policy: its weights are the log-probabilities themselves."""

    def __init__(self, rows: int, tokens: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(-torch.rand(rows, tokens))

    def forward(self) -> Tensor:
        """Return them."""
        return self.weight * 1.0


@dataclass(frozen=True, slots=True)
class TinyBatch:
    """What TRL hands to its loss, all [8, 64] or [8]."""

    mask: Tensor
    old: Tensor
    ref: Tensor
    sampling: Tensor
    entropies: Tensor
    rewards: Tensor


def trl_like_loss(logps: Tensor, batch: TinyBatch) -> tuple[Tensor, dict[str, float]]:
    """Return a GRPO loss with the options and metrics that a trainer such as TRL's has, about 130 aten calls."""

    def masked_mean(values: Tensor) -> Tensor:
        return (values * mask).sum() / mask.sum().clamp(min=1.0)

    def row_means(values: Tensor) -> Tensor:
        return (values * mask).sum(-1) / mask.sum(-1).clamp(min=1.0)

    mask = batch.mask
    grouped = batch.rewards.view(-1, GROUP_SIZE)
    means, deviations = grouped.mean(dim=1), grouped.std(dim=1)
    advantages = batch.rewards - means.repeat_interleave(GROUP_SIZE)
    advantages = (advantages / (deviations.repeat_interleave(GROUP_SIZE) + 1e-4)).unsqueeze(1)
    correction = torch.exp(batch.old - batch.sampling).clamp(max=2.0)
    log_ratio = logps - batch.old
    ratio = torch.exp(log_ratio)
    clipped_ratio = torch.clamp(ratio, 1 - CLIP, 1 + CLIP)
    per_token_kl = torch.exp(batch.ref - logps) - (batch.ref - logps) - 1
    per_token_loss = -torch.min(ratio * advantages, clipped_ratio * advantages)
    per_token_loss = per_token_loss * correction + BETA * per_token_kl
    high_entropy = (batch.entropies >= torch.quantile(batch.entropies.flatten(), 0.2)).float()
    per_token_loss = per_token_loss * high_entropy
    loss = row_means(per_token_loss).mean() - 0.001 * masked_mean(batch.entropies)
    with torch.no_grad():
        low = (ratio < 1 - CLIP) & (advantages < 0)
        high = (ratio > 1 + CLIP) & (advantages > 0)
        metrics = {"kl": masked_mean(per_token_kl), "entropy": masked_mean(batch.entropies), "ratio": masked_mean(ratio)}
        for name, which in (("low", low.float()), ("high", high.float()), ("region", (low | high).float())):
            metrics |= {f"{name}_mean": masked_mean(which), f"{name}_most": row_means(which).max()}
        gap = (batch.old - batch.sampling).abs()
        metrics |= {"gap_mean": masked_mean(gap), "gap_most": (gap * mask).max(), "correction": masked_mean(correction)}
        lengths = mask.sum(dim=1)
        metrics |= {"length_mean": lengths.mean(), "length_most": lengths.max()}
        metrics |= {"reward_mean": means.mean(), "reward_std": deviations.mean()}
    return loss, {name: value.item() for name, value in metrics.items()}


def tiny_batch() -> tuple[Scores, TinyBatch]:
    """Return what is trained, and a batch of it."""
    torch.manual_seed(0)
    shape = (GROUPS * GROUP_SIZE, COMPLETION)
    policy = Scores(*shape)
    old = policy.weight.detach() + 0.05 * torch.randn(shape)
    mask = (torch.arange(COMPLETION) < torch.randint(COMPLETION // 2, COMPLETION + 1, (shape[0], 1))).float()
    return policy, TinyBatch(
        mask, old, old + 0.1 * torch.randn(shape), old + 0.01 * torch.randn(shape), torch.rand(shape), torch.rand(shape[0])
    )


def calls(rounds: int) -> tuple[list[Figures], list[str]]:
    """Time the parts of a step, bare and watched by turns, by processor time: one call is too short for a clock that others stop."""
    policy, batch = tiny_batch()
    optimizer = torch.optim.SGD(policy.parameters(), lr=1e-6)
    with CallsMade() as counter:  # type: ignore[no-untyped-call]
        trl_like_loss(policy.weight * 1.0, batch)
    made = counter.many - 1
    times: dict[str, dict[str, list[float]]] = {variant: {part: [] for part in PARTS} for variant in (BARE, NANSCOPE)}
    for turn in range(rounds + 1):  # what was not asked for in the first is kept nowhere
        for variant in rotated(times, turn):
            with maybe_watched(variant) as scope:
                found = _parts(policy, optimizer, batch)
            if scope is not None and scope.steps != LOSSES:
                raise NanscopeError(f"nanscope saw {scope.steps} of {LOSSES} steps", slug="bench-failed")
            for part, seconds in found.items() if turn else ():
                times[variant][part].append(seconds)
    rows: list[Figures] = []
    for part, name, scale in zip(PARTS, ("a recorded call", "a backward pass", "an optimizer's step"), (made, 1, 1), strict=True):
        own, base = times[NANSCOPE][part], times[BARE][part]
        rows.append(Figures(f"{name}, bare", Quartiles.of(base).over(scale)))
        rows.append(Figures(f"{name}, added", Quartiles.of(a - b for a, b in zip(own, base, strict=True)).over(scale)))
    return rows, [f"a loss of {made} aten calls; medians of {LOSSES} steps in each of {rounds} rounds, processor time"]


def _parts(policy: Scores, optimizer: torch.optim.Optimizer, batch: TinyBatch) -> Mapping[str, float]:
    """Return the medians of the processor time that each part of a step took."""
    samples: dict[str, list[float]] = {part: [] for part in PARTS}
    for _ in range(LOSSES):
        logps = policy()
        began = time.process_time()
        loss, _ = trl_like_loss(logps, batch)
        recorded = time.process_time()
        loss.backward()  # type: ignore[no-untyped-call]
        differentiated = time.process_time()
        optimizer.step()
        stepped = time.process_time()
        optimizer.zero_grad()
        for part, seconds in zip(PARTS, (recorded - began, differentiated - recorded, stepped - differentiated), strict=True):
            samples[part].append(seconds)
    return {part: median(found) for part, found in samples.items()}


# -- sampling ----------------------------------------------------------------------------------------------------------------------------


def pick(logits: Tensor, ids: Tensor, ended: Tensor) -> tuple[Tensor, Tensor]:
    """Choose the next tokens as samplers do: repetition penalty, temperature, top-k, top-p. All of it outside the model."""
    scores = logits[:, -1]
    seen = scores.gather(1, ids)
    scores = scores.scatter(1, ids, torch.where(seen < 0, seen * 1.1, seen / 1.1)) / 0.9
    scores = scores.masked_fill(scores < scores.topk(50).values[:, -1:], -torch.inf)
    ordered, order = scores.sort(descending=True)
    probabilities = ordered.softmax(dim=-1)
    outside = probabilities.cumsum(dim=-1) - probabilities > 0.95
    scores = scores.masked_fill(outside.scatter(1, order, outside), -torch.inf)
    chosen = torch.multinomial(scores.softmax(dim=-1), 1).masked_fill(ended, 0)
    return torch.cat([ids, chosen], dim=1), ended | (chosen == 1)


@torch.no_grad()
def sample(policy: Transformer, prompts: Tensor, tokens: int) -> Tensor:
    """Sample completions. [B, PROMPT] -> [B, PROMPT + tokens]"""
    torch.manual_seed(1)
    ids, ended = prompts, torch.zeros(prompts.shape[0], 1, dtype=torch.bool)
    for _ in range(tokens):
        ids, ended = pick(policy(ids, last=True), ids, ended)
    return ids


def _sample_into(found: list[Tensor], policy: Transformer, prompts: Tensor, tokens: int) -> None:
    found.append(sample(policy, prompts, tokens))


POLICIES: dict[str, Callable[[], Transformer]] = {"24 M": Transformer, "1 M": lambda: Transformer(64, 2, 2)}


def generation(rounds: int, tokens: int) -> tuple[list[Figures], list[str]]:
    """Time sampling, bare and watched, by turns, for a large and a small policy. Raises NanscopeError if other tokens come out."""
    rows: list[Figures] = []
    torch.manual_seed(0)
    for name, build in POLICIES.items():
        policy = build()
        prompts = torch.randint(2, VOCABULARY, (GROUPS * GROUP_SIZE, PROMPT))
        times: dict[str, list[list[Seconds]]] = {BARE: [], NANSCOPE: []}
        expected = sample(policy, prompts, tokens)
        for turn in range(rounds):
            for variant in rotated(times, turn):
                ids: list[Tensor] = []
                with maybe_watched(variant):
                    times[variant].append([seconds_of(partial(_sample_into, ids, policy, prompts, tokens))])
                if not torch.equal(ids[0], expected):
                    raise NanscopeError(f"{variant}: other tokens were sampled", slug="bench-failed")
        rows += [compared(f"{name}, {variant}", times[variant], times[BARE], per=tokens) for variant in times]
        added = [own.cpu - base.cpu for (base,), (own,) in zip(times[BARE], times[NANSCOPE], strict=True)]
        rows.append(Figures(f"{name}, added processor time", Quartiles.of(added).over(tokens)))
    return rows, ["tokens: the same ones, bare and nanscope"]
