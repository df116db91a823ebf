"""What watching a run costs, next to the other ways to look for NaN and to no watching at all.

    python tests/benchmarks/overhead.py [--steps N] [--json FILE]     # a GRPO step: seconds, and peak memory in processes of their own
    python tests/benchmarks/overhead.py --generate                    # sampling: it happens inside the watched block too
    python tests/benchmarks/overhead.py --tiny                        # microseconds per recorded call, where the tensors cost nothing

    a GRPO step of 24 M parameters on cpu: 20 steps per variant, medians [quartiles]
    variant                      seconds per step                 ratio       ratio, CPU time              peak MB  ratio
    bare                     1.097 [1.062, 1.255]  1.000 [1.000, 1.000]  1.000 [1.000, 1.000]    1097 [1093, 1098]  1.000
    nanscope                 1.170 [1.077, 1.365]  1.044 [0.993, 1.120]  1.044 [0.993, 1.115]    1140 [1130, 1144]  1.040
    bare again               1.152 [1.106, 1.190]  0.999 [0.927, 1.030]  0.999 [0.927, 1.029]    1103 [1099, 1108]  1.006
    detect_anomaly           1.348 [1.320, 1.420]  1.240 [1.142, 1.258]  1.240 [1.142, 1.256]    1122 [1114, 1123]  1.024
    DebugUnderflowOverflow   1.486 [1.460, 1.536]  1.343 [1.268, 1.401]  1.343 [1.266, 1.401]    1119 [1119, 1126]  1.021
    weights: bit-identical, bare and nanscope, in every round

There is one model and one optimizer. Variants take turns: in each round every variant gets the same weights back, at the same addresses,
makes one step that is not timed and then a few that are; the order rotates. A ratio is paired: the variant's step over the bare step of
the same round. "bare again" is bare a second time and says how much of a ratio is noise. Memory is `ru_maxrss` of a process that runs
one variant only, so it counts torch itself. Times are printed and never judged; what is judged is that the weights after each round are
the same to the last bit, and that nanscope saw every step.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

import nanscope
from nanscope.snapshot.runs import DEEP_EVERY

try:
    from transformers.debug_utils import DebugUnderflowOverflow
except ImportError:  # the variant is left out
    DebugUnderflowOverflow = None

VOCABULARY = 8192
PROMPT, COMPLETION = 16, 64  # tokens
GROUPS, GROUP_SIZE = 2, 4
BETA, CLIP = 0.04, 0.2
TIMED = 2  # steps per variant and round that are timed, after one that is not
MEMORY_RUNS, MEMORY_STEPS = 3, 5
SAMPLED = 32  # tokens per completion in the generation mode


# -- the run that is watched -------------------------------------------------------------------------------------------------------------


class Block(nn.Module):
    """A pre-norm transformer block. [B, T, D] -> [B, T, D]"""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm, self.feed_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query_key_value, self.attention_out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.feed = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, hidden: Tensor) -> Tensor:
        rows, length, width = hidden.shape
        split = self.query_key_value(self.attention_norm(hidden)).view(rows, length, 3, self.heads, width // self.heads)
        query, key, value = (part.transpose(1, 2) for part in split.unbind(dim=2))
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self.attention_out(attended.transpose(1, 2).reshape(rows, length, width))
        return hidden + self.feed(self.feed_norm(hidden))


class Policy(nn.Module):
    """A causal language model: token ids [B, T] -> logits [B, T, V], or [B, 1, V]. The defaults give 24 million parameters."""

    def __init__(self, width: int = 384, layers: int = 10, heads: int = 6) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, width), nn.Embedding(PROMPT + COMPLETION, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, ids: Tensor, last: bool = False) -> Tensor:
        hidden = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            hidden = block(hidden)
        logits: Tensor = self.head(self.norm(hidden[:, -1:] if last else hidden))
        return logits


class Work:
    """A policy, its optimizer and one batch of completions with rewards; `step` is one GRPO step, `restore` goes back to the start."""

    def __init__(self, device: str) -> None:
        torch.manual_seed(0)
        self.device = device
        self.steps = 0
        self.policy = Policy().to(device)
        self.optimizer = torch.optim.AdamW(self.policy.parameters(), lr=1e-5)
        rows = GROUPS * GROUP_SIZE
        self.ids = torch.randint(0, VOCABULARY, (rows, PROMPT + COMPLETION)).to(device)
        lengths = torch.randint(COMPLETION // 2, COMPLETION + 1, (rows, 1))
        self.mask = (torch.arange(COMPLETION) < lengths).float().to(device)
        self.rewards = torch.rand(rows).to(device)
        with torch.no_grad():
            logps = self.logps()
        self.old_logps = logps + 0.05 * torch.randn(rows, COMPLETION).to(device)
        self.ref_logps = logps + 0.10 * torch.randn(rows, COMPLETION).to(device)
        self.start = self.weights()

    def logps(self) -> Tensor:
        """Log-probabilities of the completions' tokens. [B, T]"""
        logits = self.policy(self.ids)[:, PROMPT - 1 : -1]
        return torch.log_softmax(logits, dim=-1).gather(2, self.ids[:, PROMPT:, None]).squeeze(2)

    def step(self) -> None:
        """Loss, backward, clipping, update."""
        grouped = self.rewards.view(GROUPS, GROUP_SIZE)
        advantages = ((grouped - grouped.mean(1, keepdim=True)) / (grouped.std(1, keepdim=True) + 1e-4)).view(-1, 1)
        logps = self.logps()
        ratio = torch.exp(logps - self.old_logps)
        clipped_ratio = torch.clamp(ratio, 1 - CLIP, 1 + CLIP)
        per_token_loss = -torch.min(ratio * advantages, clipped_ratio * advantages)
        per_token_kl = torch.exp(self.ref_logps - logps) - (self.ref_logps - logps) - 1
        per_token_loss = per_token_loss + BETA * per_token_kl
        loss = (per_token_loss * self.mask).sum() / self.mask.sum()
        loss.backward()
        nn.utils.clip_grad_norm_(self.policy.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.steps += 1

    def weights(self) -> list[Tensor]:
        """A copy of the weights."""
        return [parameter.detach().clone() for parameter in self.policy.parameters()]

    def restore(self) -> None:
        """Weights as at the start and an optimizer that has seen nothing, without moving either in memory."""
        with torch.no_grad():
            for parameter, start in zip(self.policy.parameters(), self.start, strict=True):
                parameter.copy_(start)
        for state in self.optimizer.state.values():
            for tensor in state.values():
                tensor.zero_()


# -- the variants ------------------------------------------------------------------------------------------------------------------------


class Failed(Exception):
    """Something that the benchmark does judge went wrong."""


@contextlib.contextmanager
def bare(work: Work) -> Iterator[None]:
    """Nothing at all."""
    yield


@contextlib.contextmanager
def watched(work: Work, deep_every: int = 0) -> Iterator[None]:
    """nanscope without deep looks, of which a run so short would be full: `deep` is one in every step.

    Afterwards: was each step seen, its loss recorded and its largest exponent read?
    """
    before = work.steps
    with tempfile.TemporaryDirectory() as folder, nanscope.watch(out=folder, deep_every=deep_every) as scope:
        yield
    entries = scope.history.entries
    if scope.steps != work.steps - before or any(entry.loss is None or entry.grad_norm is None for entry in entries):
        raise Failed(f"nanscope saw {scope.steps} of {work.steps - before} steps, or not all of them whole")
    if work.device == "cpu" and any(entry.headroom is None for entry in entries):
        raise Failed("nanscope did not record the loss")


@contextlib.contextmanager
def anomaly(work: Work) -> Iterator[None]:
    """torch's anomaly mode; its warning that it is slow is not shown."""
    with warnings.catch_warnings(action="ignore"), torch.autograd.detect_anomaly(check_nan=True):
        yield


@contextlib.contextmanager
def underflow_overflow(work: Work) -> Iterator[None]:
    """transformers' detector. It puts a forward hook on every module and has no way to take them off again."""
    modules = list(work.policy.modules())
    before = [set(module._forward_hooks) for module in modules]
    DebugUnderflowOverflow(work.policy)
    try:
        yield
    finally:
        for module, known in zip(modules, before, strict=True):
            for key in set(module._forward_hooks) - known:
                del module._forward_hooks[key]


VARIANTS: dict[str, Callable[[Work], AbstractContextManager[None]]] = {
    "bare": bare,
    "nanscope": watched,
    "a deep look each step": partial(watched, deep_every=1),
    "bare again": bare,
    "detect_anomaly": anomaly,
}
if DebugUnderflowOverflow is not None:
    VARIANTS["DebugUnderflowOverflow"] = underflow_overflow


# -- measuring ---------------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Spread:
    """A median and the quartiles around it."""

    median: float
    low: float
    high: float

    @staticmethod
    def of(values: list[float]) -> Spread:
        """Return the spread of some measurements."""
        low, _, high = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else values * 3
        return Spread(statistics.median(values), low, high)

    def over(self, scale: float) -> Spread:
        """Return the spread in another unit."""
        return Spread(self.median / scale, self.low / scale, self.high / scale)

    def show(self, digits: int = 3) -> str:
        """Return the median and, in brackets, the interquartile range."""
        return f"{self.median:.{digits}f} [{self.low:.{digits}f}, {self.high:.{digits}f}]"


@dataclass(frozen=True)
class Row:
    """One line of the main table. seconds, ratio: by the clock. cpu_ratio: by processor time, which other work on the machine stretches
    less; None on a GPU. peak: bytes. syncs: waits for the device in one step, None on a CPU."""

    variant: str
    seconds: Spread
    ratio: Spread
    cpu_ratio: Spread | None
    peak: Spread
    peak_ratio: float
    same_bits: bool
    syncs: int | None


class Seconds(NamedTuple):
    """How long something took: by the clock, and of this process's processor time."""

    wall: float
    cpu: float


def seconds_of(function: Callable[[], object], device: str = "cpu") -> Seconds:
    """Time one call, with the device idle before and after."""
    if device == "cuda":
        torch.cuda.synchronize()
    began, began_cpu = time.perf_counter(), time.process_time()
    function()
    if device == "cuda":
        torch.cuda.synchronize()
    return Seconds(time.perf_counter() - began, time.process_time() - began_cpu)


def ratios(own: list[list[float]], base: list[list[float]]) -> Spread:
    """Return the spread of the rounds' ratios, median over median."""
    return Spread.of([statistics.median(ours) / statistics.median(theirs) for ours, theirs in zip(own, base, strict=True)])


def bits_equal(left: list[Tensor], right: list[Tensor]) -> bool:
    """Compare float32 tensors as integers: -0.0 is not 0.0, and a NaN equals itself."""
    return all(torch.equal(a.view(torch.int32), b.view(torch.int32)) for a, b in zip(left, right, strict=True))


def count_syncs(step: Callable[[], None]) -> int:
    """Return how often one step waits for the GPU, by torch's own account."""
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return sum("synchroniz" in str(warning.message) for warning in caught)


def rotated(names: list[str], by: int) -> list[str]:
    """Return the names, starting somewhere else."""
    return names[by % len(names) :] + names[: by % len(names)]


def compare_steps(device: str, steps: int, peaks: dict[str, Spread]) -> list[Row]:
    """Time all variants by turns.

    steps: timed steps per variant. peaks: memory, where it was measured elsewhere; otherwise the device is asked.
    """
    work = Work(device)
    times: dict[str, list[list[Seconds]]] = {variant: [] for variant in VARIANTS}
    allocated: dict[str, list[float]] = {variant: [] for variant in VARIANTS}
    same = dict.fromkeys(VARIANTS, True)
    syncs: dict[str, int] = {}
    expected: list[Tensor] = []
    for turn in range(1 + max(2, -(-steps // TIMED))):  # round 0 warms up and says what the weights should become
        for variant in rotated(list(VARIANTS), turn):
            work.restore()
            if device == "cuda":
                torch.cuda.reset_peak_memory_stats()
            with VARIANTS[variant](work):
                work.step()
                group = [seconds_of(work.step, device) for _ in range(TIMED)]
                allocated[variant].append(float(torch.cuda.max_memory_allocated()) if device == "cuda" else 0.0)
                reached = work.weights()
                if device == "cuda" and not turn:
                    syncs[variant] = count_syncs(work.step)
            expected = expected or reached
            same[variant] &= bits_equal(reached, expected)
            if turn:
                times[variant].append(group)
    if not all(bool(weight.isfinite().all()) for weight in expected):
        raise Failed("the weights are not finite")
    rows = []
    for variant in VARIANTS:
        peak, base_peak = (peaks.get(name) or Spread.of(allocated[name][1:]) for name in (variant, "bare"))
        wall, base_wall = ([[seconds.wall for seconds in group] for group in times[name]] for name in (variant, "bare"))
        cpu, base_cpu = ([[seconds.cpu for seconds in group] for group in times[name]] for name in (variant, "bare"))
        rows.append(
            Row(
                variant=variant,
                seconds=Spread.of([seconds for group in wall for seconds in group]),
                ratio=ratios(wall, base_wall),
                cpu_ratio=ratios(cpu, base_cpu) if device == "cpu" else None,
                peak=peak,
                peak_ratio=peak.median / base_peak.median,
                same_bits=same[variant],
                syncs=syncs.get(variant),
            )
        )
    return rows


def peak_of(variant: str) -> None:
    """Run some steps of one variant and print the most memory that this process ever held, in bytes."""
    work = Work("cpu")
    with VARIANTS[variant](work):
        for _ in range(MEMORY_STEPS):
            work.step()
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024))


def measure_peaks() -> dict[str, Spread]:
    """Return the peak of each variant in processes of its own.

    Comes before this process has grown: on Linux a child starts out with its parent's peak.
    """
    peaks: dict[str, list[float]] = {variant: [] for variant in VARIANTS}
    for turn in range(MEMORY_RUNS):
        for variant in rotated(list(VARIANTS), turn):
            command = [sys.executable, __file__, "--peak-of", variant, "--threads", str(torch.get_num_threads())]
            done = subprocess.run(command, check=True, capture_output=True, text=True)
            peaks[variant].append(float(done.stdout.split()[-1]))
    return {variant: Spread.of(values) for variant, values in peaks.items()}


def print_steps(device: str, rows: list[Row]) -> None:
    """Print the main table and whether nanscope left the run as it was. Raises Failed if it did not."""
    last = "waits per step" if device == "cuda" else "ratio, CPU time"
    print(f"{'variant':<23}{'seconds per step':>22}{'ratio':>22}{last:>22}{'peak MB':>21}{'ratio':>7}")
    for row in rows:
        extra = str(row.syncs) if row.cpu_ratio is None else row.cpu_ratio.show()
        print(
            f"{row.variant:<23}{row.seconds.show():>22}{row.ratio.show():>22}{extra:>22}{row.peak.over(1e6).show(0):>21}{row.peak_ratio:>7.3f}"
        )
    same = {row.variant: row.same_bits for row in rows}
    ratio = {row.variant: row.ratio.median for row in rows}
    amortised = (ratio["a deep look each step"] - ratio["nanscope"]) / DEEP_EVERY
    print(f"deep looks in one of {DEEP_EVERY} steps: {amortised:+.2%} of a bare step")
    if not (same["bare"] and same["bare again"]):
        print("weights: bare does not repeat itself to the last bit here, so nothing can be said about nanscope")
        if device == "cpu":
            raise Failed("a bare run on the CPU should repeat itself")
    elif same["nanscope"] and same["a deep look each step"]:
        print("weights: bit-identical, bare and nanscope, with deep looks and without, in every round")
    else:
        raise Failed("nanscope changed the weights")


# -- generation --------------------------------------------------------------------------------------------------------------------------


class Counter(TorchDispatchMode):
    """Counts aten calls."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


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
def generate(policy: Policy, prompts: Tensor) -> Tensor:
    """Sample completions. [B, PROMPT] -> [B, PROMPT + SAMPLED]"""
    torch.manual_seed(1)
    ids, ended = prompts, torch.zeros(prompts.shape[0], 1, dtype=torch.bool)
    for _ in range(SAMPLED):
        ids, ended = pick(policy(ids, last=True), ids, ended)
    return ids


def compare_generation(rounds: int) -> dict[str, Any]:
    """Time generation bare and watched, by turns, for a large and a small policy, and print it."""
    found: dict[str, Any] = {}
    print(f"{SAMPLED} tokens for each of {GROUPS * GROUP_SIZE} prompts, {rounds} rounds; calls: those outside the model, per token")
    print(f"{'policy':<7}{'calls':>7}{'bare, ms per token':>26}{'nanscope, ms per token':>26}{'ratio, CPU time':>24}{'added, CPU µs':>24}")
    for name, policy in {"24 M": Policy(), "1 M": Policy(64, 2, 2)}.items():
        prompts = torch.randint(2, VOCABULARY, (GROUPS * GROUP_SIZE, PROMPT))
        with Counter() as counter, torch.no_grad():
            pick(torch.zeros(prompts.shape[0], 1, VOCABULARY), prompts, torch.zeros(prompts.shape[0], 1, dtype=torch.bool))
        times: dict[str, list[Seconds]] = {"bare": [], "nanscope": []}
        expected = generate(policy, prompts)
        for turn in range(rounds):
            for variant in rotated(list(times), turn):
                with contextlib.ExitStack() as stack:
                    if variant == "nanscope":
                        stack.enter_context(nanscope.watch(out=stack.enter_context(tempfile.TemporaryDirectory())))
                    ids: list[Tensor] = []
                    times[variant].append(seconds_of(lambda: ids.append(generate(policy, prompts))))
                if not torch.equal(ids[0], expected):
                    raise Failed(f"{variant}: other tokens were sampled")
        ratio = ratios([[own.cpu] for own in times["nanscope"]], [[base.cpu] for base in times["bare"]])
        own, base = (Spread.of([seconds.wall for seconds in times[variant]]).over(SAMPLED * 1e-3) for variant in ("nanscope", "bare"))
        added = Spread.of([own.cpu - base.cpu for base, own in zip(*times.values(), strict=True)]).over(SAMPLED * 1e-6)
        print(f"{name:<7}{counter.count:>7}{base.show(2):>26}{own.show(2):>26}{ratio.show():>24}{added.show(0):>24}")
        found[name] = {"bare_ms": asdict(base), "nanscope_ms": asdict(own), "cpu_ratio": asdict(ratio), "added_cpu_us": asdict(added)}
    return found


# -- recorded calls ----------------------------------------------------------------------------------------------------------------------


class Scores(nn.Module):
    """Stands for a policy: its weights are the log-probabilities themselves."""

    def __init__(self, shape: tuple[int, int]) -> None:
        super().__init__()
        self.weight = nn.Parameter(-torch.rand(shape))

    def forward(self) -> Tensor:
        return self.weight * 1.0


@dataclass
class TinyBatch:
    """What TRL hands to its loss, all [8, 64] or [8]."""

    mask: Tensor
    old: Tensor
    ref: Tensor
    sampling: Tensor
    entropies: Tensor
    rewards: Tensor


def trl_like_loss(logps: Tensor, batch: TinyBatch) -> tuple[Tensor, dict[str, float]]:
    """A GRPO loss with the options and metrics that a trainer such as TRL's has, about 130 aten calls."""

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


def compare_calls(rounds: int, losses: int = 50) -> dict[str, Any]:
    """Time the parts of a step whose tensors are next to nothing, bare and watched by turns, and print what nanscope adds."""
    shape = (8, COMPLETION)
    torch.manual_seed(0)
    policy = Scores(shape)
    optimizer = torch.optim.SGD(policy.parameters(), lr=1e-6)
    old = policy.weight.detach() + 0.05 * torch.randn(shape)
    mask = (torch.arange(COMPLETION) < torch.randint(COMPLETION // 2, COMPLETION + 1, (shape[0], 1))).float()
    batch = TinyBatch(mask, old, old + 0.1 * torch.randn(shape), old + 0.01 * torch.randn(shape), torch.rand(shape), torch.rand(shape[0]))
    with Counter() as counter:
        trl_like_loss(policy.weight * 1.0, batch)
    calls = counter.count - 1
    parts = ("forward", "backward", "optimizer step")
    times: dict[str, dict[str, list[float]]] = {variant: {part: [] for part in parts} for variant in ("bare", "nanscope")}
    for turn in range(rounds + 1):
        for variant in rotated(list(times), turn):
            with contextlib.ExitStack() as stack:
                if variant == "nanscope":
                    stack.enter_context(nanscope.watch(out=stack.enter_context(tempfile.TemporaryDirectory())))
                samples: dict[str, list[float]] = {part: [] for part in parts}
                for _ in range(losses):
                    logps = policy()
                    began = time.process_time()
                    loss, _ = trl_like_loss(logps, batch)
                    recorded = time.process_time()
                    loss.backward()
                    differentiated = time.process_time()
                    optimizer.step()
                    stepped = time.process_time()
                    optimizer.zero_grad()
                    for part, seconds in zip(parts, (recorded - began, differentiated - recorded, stepped - differentiated), strict=True):
                        samples[part].append(seconds)
            if turn:
                for part in parts:
                    times[variant][part].append(statistics.median(samples[part]))
    print(f"a loss of {calls} aten calls on {list(shape)}; CPU µs, medians of {losses} steps, {rounds} rounds")
    print(f"{'part':<30}{'bare':>24}{'nanscope':>24}{'added':>24}")
    found: dict[str, Any] = {"calls": calls}
    for part, unit, scale in (("forward", "forward, per recorded call", calls), *((part, f"{part}, in all", 1) for part in parts[1:])):
        own, other = times["nanscope"][part], times["bare"][part]
        shown = [Spread.of(values).over(scale * 1e-6) for values in (other, own, [a - b for a, b in zip(own, other, strict=True)])]
        print(f"{unit:<30}" + "".join(f"{spread.show(1):>24}" for spread in shown))
        found[part] = dict(zip(("bare_us", "nanscope_us", "added_us"), map(asdict, shown), strict=True))
    return found


# -- the command -------------------------------------------------------------------------------------------------------------------------


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=30, help="timed steps per variant; rounds with --generate and --tiny (30)")
    parser.add_argument("--threads", type=int, default=1, help="threads for torch (1: beside other work, several wait for each other)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there as well")
    parser.add_argument("--generate", action="store_true", help="compare a sampling loop instead")
    parser.add_argument("--tiny", action="store_true", help="measure single recorded calls instead")
    parser.add_argument("--peak-of", choices=VARIANTS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if args.peak_of:
        peak_of(args.peak_of)
        return 0
    figures: dict[str, Any] = {"torch": torch.__version__, "nanscope": nanscope.__version__, "threads": torch.get_num_threads()}
    print(f"torch {torch.__version__}, Python {platform.python_version()}, threads: {torch.get_num_threads()}, cores: {os.cpu_count()}")
    try:
        if args.generate:
            figures["generate"] = compare_generation(args.steps)
        elif args.tiny:
            figures["tiny"] = compare_calls(args.steps)
        else:
            for device in ("cpu", "cuda"):
                if device == "cuda" and not torch.cuda.is_available():
                    print("CUDA is not available: the GPU part is skipped")
                    continue
                peaks = measure_peaks() if device == "cpu" else {}
                rows = compare_steps(device, args.steps, peaks)
                figures[device] = [asdict(row) for row in rows]
                print(f"a GRPO step of 24 M parameters on {device}: {args.steps} steps per variant, medians [quartiles]")
                print_steps(device, rows)
    except Failed as error:
        print(f"FAILED: {error}", file=sys.stderr)
        return 1
    finally:
        if args.json:
            args.json.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
