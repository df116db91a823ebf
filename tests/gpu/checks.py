"""What is asked of nanscope on a GPU, each question a function of the device: `tests/gpu/table.py` prints the answers, `test_gpu.py` holds them.

All but CUDA's own things run on a CPU, too, so that what is asked there is code that has run before.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # with streams of its own cuBLAS gives the same numbers only so

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import nanscope

WORDS, STEPS, BAD = 64, 4, 2


@dataclass(frozen=True)
class Size:
    """Of a model and its batches."""

    layers: int = 2
    width: int = 32
    rows: int = 2
    tokens: int = 8


LARGE = Size(8, 1024, 8, 512)


class Answer(NamedTuple):
    """What came out. holds: as it should."""

    holds: bool
    told: str


class Block(nn.Module):
    """Attention and a gated layer, with a norm before each."""

    def __init__(self, width: int, linear: Callable[[int, int], nn.Module]) -> None:
        super().__init__()
        self.qkv, self.out = linear(width, 3 * width), linear(width, width)
        self.up, self.down = linear(width, 4 * width), linear(4 * width, width)
        self.norms = nn.ModuleList([nn.RMSNorm(width), nn.RMSNorm(width)])
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        heads = [part.unflatten(-1, (-1, 16)).transpose(1, 2) for part in self.qkv(self.norms[0](x)).chunk(3, -1)]
        x = x + self.drop(self.out(nn.functional.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).flatten(2)))
        out: Tensor = x + self.down(nn.functional.silu(self.up(self.norms[1](x))))
        return out


class Policy(nn.Module):
    """A small language model. hot: its last hidden states overflow."""

    def __init__(self, size: Size, linear: Callable[[int, int], nn.Module] = nn.Linear) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, size.width)
        self.blocks = nn.ModuleList([Block(size.width, linear) for _ in range(size.layers)])
        self.head = nn.Linear(size.width, WORDS)
        self.hot = False

    def hidden(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        out: Tensor = x + torch.exp(x * 0 + 100.0) if self.hot else x
        return out

    def forward(self, ids: Tensor) -> Tensor:
        out: Tensor = self.head(self.hidden(ids))
        return out


def grpo(log_probs: Tensor, old: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    """The loss, as trainers write it."""
    ratio = torch.exp(log_probs - old)
    surrogate = torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
    return -(surrogate * mask).sum() / mask.sum()


FAULTS = ("none", "loss", "ratio", "model", "weights")


@dataclass
class Loop:
    """Trains, bare or watched, and says what there is to compare. fault: in the third step. stream: whether the model runs on another one."""

    device: str
    fault: str = "none"
    size: Size = Size()
    loss: Callable[..., Tensor] = grpo
    linear: Callable[[int, int], nn.Module] = nn.Linear
    autocast: bool = False
    stream: bool = False
    steps: int = STEPS

    def __call__(self, around: AbstractContextManager[Any]) -> str:
        torch.manual_seed(0)
        model = Policy(self.size, self.linear).to(self.device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        with around:
            for step in range(self.steps):
                self.step(model, optimizer, self.fault if step == BAD else "none")
        return digest([*model.parameters(), torch.get_rng_state(), *([torch.cuda.get_rng_state()] if self.device == "cuda" else [])])

    def step(self, model: Policy, optimizer: torch.optim.Optimizer, fault: str) -> None:
        ids = torch.randint(0, WORDS, (self.size.rows, self.size.tokens), device=self.device)
        model.hot = fault == "model"
        with torch.autocast(self.device, dtype=torch.bfloat16) if self.autocast else nullcontext():
            with self.beside():
                logits = model(ids[:, :-1])
            log_probs = logits.float().log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)
            old = log_probs.detach() - (200.0 if fault == "ratio" else 0.0)
            mask = torch.ones_like(log_probs) * (fault != "loss")
            loss = self.loss(log_probs, old, -torch.ones_like(old), mask)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = math.inf if fault == "weights" else 1e-3
        optimizer.step()

    @contextlib.contextmanager
    def beside(self) -> Any:
        """On a stream of its own, where there is such a thing."""
        if not self.stream or self.device != "cuda":
            yield
            return
        other, here = torch.cuda.Stream(), torch.cuda.current_stream()
        other.wait_stream(here)
        with torch.cuda.stream(other):
            yield
        here.wait_stream(other)


def digest(tensors: list[Tensor]) -> str:
    """Of all bits."""
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(tensor.detach().contiguous().view(torch.uint8).cpu().numpy().tobytes())
    return found.hexdigest()[:16]


def compared(loop: Callable[[AbstractContextManager[Any]], str]) -> tuple[bool, Any]:
    """Run it bare and watched: is it the same, and what was found?"""
    with sdpa_kernel(SDPBackend.MATH), tempfile.TemporaryDirectory() as out:  # the backward of the others adds in any order
        scope = nanscope.watch(out=out)
        bare, watched, again = loop(nullcontext()), loop(scope), loop(nullcontext())
        if bare != again:
            raise ValueError("the bare run is not its own twin: nothing can be said of the watched one")
        return bare == watched, scope.verdict


CAUSES = {  # of the first incident, and the operator
    "loss": ("empty_mask_mean", "div"),
    "ratio": ("exp_overflow", "exp"),
    "model": ("exp_overflow", "exp"),
    "weights": ("bad_input", None),
}


def judged(loop: Callable[[AbstractContextManager[Any]], str], fault: str, says: bool = True) -> Answer:
    """Is the watched run the bare one, and is what is said of it true? says: the origin is told, and not only that it was bad."""
    same, verdict = compared(loop)
    if fault == "none":
        right = verdict.status == "healthy"
    else:
        first = verdict.incidents[0] if verdict.incidents else None
        cause, op = CAUSES[fault]
        right = first is not None and first.step == BAD + 1
        right = right and (not says or (first.cause == cause and op in (None, first.origin.op)))
    words = verdict.status if fault == "none" or not verdict.incidents else verdict.sentence
    return Answer(same and right, f"{'bit-identical' if same else 'NOT the bare run'}; {words}")


# -- the questions -----------------------------------------------------------------------------------------------------------------------


def invariance(device: str, fault: str = "none", autocast: bool = False) -> Answer:
    """Are weights and generators those of the bare run, and is the fault found?"""
    return judged(Loop(device, fault, autocast=autocast), fault, says=fault != "ratio")  # the clamp's side may be the one that is taken


def side_stream(device: str, fault: str = "none") -> Answer:
    """The same, where the model runs on another stream than its loss."""
    return judged(Loop(device, fault, stream=True), fault)


def compiled_loss(device: str, fault: str = "none") -> Answer:
    """A loss that torch.compile has fused: nothing in it is seen, and that it is bad is."""
    torch._dynamo.reset()
    counters = torch._dynamo.utils.counters
    counters.clear()
    # on a CPU without a compiler of its own, the graph is captured all the same
    loss = torch.compile(grpo, backend="inductor" if device == "cuda" else "aot_eager")
    answer = judged(Loop(device, fault, loss=loss), fault, says=False)
    graphs = counters["stats"]["unique_graphs"]
    return Answer(answer.holds and graphs <= 2, f"{answer.told}; {graphs} graphs for both runs")


class Float8(nn.Module):
    """A layer that multiplies in float8, with a scale for each tensor, and differentiates in the precision it was given. broken: no scale."""

    broken = False

    def __init__(self, given: int, made: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(made, given) / math.sqrt(given))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = _Multiply.apply(x.flatten(0, -2), self.weight)  # type: ignore[no-untyped-call]
        return out.unflatten(0, x.shape[:-1])


class _Multiply(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        (a, a_scale), (b, b_scale) = quantised(x), quantised(weight)
        rows = -len(a) % 16  # the kernel takes sixteens
        if x.device.type == "cuda":
            made = torch._scaled_mm(
                nn.functional.pad(a.view(torch.uint8), (0, 0, 0, rows)).view(a.dtype), b.t(), a_scale, b_scale, out_dtype=torch.bfloat16
            )
            return made[: len(a)].to(x.dtype)
        return ((a.float() * a_scale) @ (b.float() * b_scale).t()).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return grad @ weight, grad.t() @ x


def quantised(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """Return a tensor in float8, and its scale, float32."""
    scale = tensor.detach().abs().amax().float().clamp(min=1e-12) / torch.finfo(torch.float8_e4m3fn).max
    return (tensor.detach().float() / scale).to(torch.float8_e4m3fn), scale


def float8(device: str, fault: str = "none") -> Answer:
    """Layers in float8: torch._scaled_mm on a GPU."""
    if device == "cuda" and torch.cuda.get_device_capability() < (8, 9):
        return Answer(True, "this GPU multiplies nothing in float8")
    return judged(Loop(device, fault, linear=Float8), fault, says=fault != "model")


class Graphed:
    """Forward and backward as one CUDA graph, captured inside the block, and replayed; on a CPU they are simply called."""

    def __init__(self, device: str, fault: str) -> None:
        self.device, self.fault = device, fault

    def __call__(self, around: AbstractContextManager[Any]) -> str:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 8)).to(self.device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        given = torch.randn(16, 32, device=self.device)

        def once() -> None:
            for weight in model.parameters():
                if weight.grad is not None:
                    weight.grad.zero_()
            torch.log(model(given).square() + 1.0).mean().backward()

        with around:
            replay: Callable[[], None] = once
            if self.device == "cuda":
                beside = torch.cuda.Stream()
                beside.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(beside):
                    for _ in range(3):
                        once()
                torch.cuda.current_stream().wait_stream(beside)
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    once()
                replay = graph.replay
            for step in range(STEPS):
                given.normal_()
                if step == BAD and self.fault != "none":
                    given[0, 0] = math.nan
                replay()
                optimizer.step()
        return digest(list(model.parameters()))


def cuda_graph(device: str, fault: str = "none") -> Answer:
    """A graph is captured and replayed as without nanscope; what is replayed nobody sees, and a bad step is bad all the same."""
    same, verdict = compared(Graphed(device, fault))
    seen = bool(verdict.incidents) if fault != "none" else not verdict.incidents
    return Answer(same and seen, f"{'bit-identical' if same else 'NOT the bare run'}; {verdict.sentence or verdict.status}")


def liger(device: str, fault: str = "none") -> Answer:
    """Liger's loss over hidden states and the head: its kernels on a GPU, the same functions uncompiled on a CPU."""
    try:
        from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss
    except ImportError:
        return Answer(True, "not installed")
    fused = LigerFusedLinearGRPOLoss(beta=0.0, compiled=device == "cuda", use_ref_model=False)

    def loop(around: AbstractContextManager[Any]) -> str:
        torch.manual_seed(0)
        model = Policy(Size()).to(device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        with around:
            for step in range(STEPS):
                ids = torch.randint(0, WORDS, (2, 8), device=device)
                model.hot = fault == "model" and step == BAD
                hidden = Body.apply_to(model, ids[:, :-1])
                mask = torch.ones(2, 7, device=device)
                loss, *_ = fused(hidden, model.head.weight, ids[:, 1:], mask, torch.ones(2, device=device), bias=model.head.bias)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
        return digest(list(model.parameters()))

    same, verdict = compared(loop)
    right = bool(verdict.incidents) if fault != "none" else verdict.status == "healthy"
    return Answer(same and right, f"{'bit-identical' if same else 'NOT the bare run'}; {verdict.sentence or verdict.status}")


class Body(nn.Module):
    """The model without its head, as a module that is called."""

    def __init__(self, model: Policy) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor) -> Tensor:
        return self.model.hidden(ids)

    @staticmethod
    def apply_to(model: Policy, ids: Tensor) -> Tensor:
        out: Tensor = Body(model)(ids)
        return out


def liger_triton(device: str, fault: str = "none") -> Answer:
    """Liger's cross-entropy, a kernel in Triton that writes its gradient over the logits."""
    if device != "cuda":
        return Answer(True, "needs a GPU")
    try:
        from liger_kernel.transformers import LigerCrossEntropyLoss
    except ImportError:
        return Answer(True, "not installed")
    criterion = LigerCrossEntropyLoss()

    def loss(log_probs: Tensor, old: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
        logits = torch.stack([log_probs, old], -1).flatten(0, 1)
        made: Tensor = criterion(logits * mask.mean(), torch.zeros(len(logits), dtype=torch.long, device=device))
        return made

    return judged(Loop(device, fault, loss=loss), fault, says=fault == "model")


def overhead(device: str, size: Size = Size(), rounds: int = 3) -> Answer:
    """How much longer a step takes: the median of steps, bare and watched in turns. Measured, and told; nothing is asserted of a time."""

    def seconds(around: AbstractContextManager[Any]) -> list[float]:
        torch.manual_seed(0)
        loop = Loop(device, size=size, autocast=True)
        model = Policy(size).to(device)
        optimizer, found = torch.optim.AdamW(model.parameters(), lr=1e-3), []
        with around:
            for _ in range(12):
                settle(device)
                began = time.perf_counter()
                loop.step(model, optimizer, "none")
                settle(device)
                found.append(time.perf_counter() - began)
        return found[4:]

    bare: list[float] = []
    watched: list[float] = []
    for _ in range(rounds):
        bare += seconds(nullcontext())
        with tempfile.TemporaryDirectory() as out:
            watched += seconds(nanscope.watch(out=out))
    ratio = statistics.median(watched) / statistics.median(bare)
    return Answer(True, f"{ratio:.3f} × ({statistics.median(bare) * 1e3:.1f} ms a step)")


def settle(device: str) -> None:
    """Wait until the device has nothing to do."""
    if device == "cuda":
        torch.cuda.synchronize()


def memory(device: str, size: Size = Size()) -> Answer:
    """The peak of what is allocated, watched and bare; the head's logits are the largest tensor."""
    if device != "cuda":
        return Answer(True, "needs a GPU")
    peaks = []
    with tempfile.TemporaryDirectory() as out:
        for around in (nullcontext(), nanscope.watch(out=out)):
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            Loop(device, size=size, autocast=True)(around)
            peaks.append(torch.cuda.max_memory_allocated())
    return Answer(peaks[1] <= 1.1 * peaks[0] + (64 << 20), f"{peaks[1] / peaks[0]:.3f} × ({peaks[0] >> 20} MiB bare)")


Check = Callable[..., Answer]

CHECKS: dict[str, Check] = {
    **{f"invariance, {fault}": partial(invariance, fault=fault) for fault in FAULTS},
    **{f"invariance in bfloat16, {fault}": partial(invariance, fault=fault, autocast=True) for fault in ("none", "loss")},
    **{f"model on a side stream, {fault}": partial(side_stream, fault=fault) for fault in ("none", "model")},
    **{f"compiled loss, {fault}": partial(compiled_loss, fault=fault) for fault in ("none", "loss")},
    **{f"float8 layers, {fault}": partial(float8, fault=fault) for fault in ("none", "loss", "model")},
    **{f"CUDA graph, {fault}": partial(cuda_graph, fault=fault) for fault in ("none", "NaN in the batch")},
    **{f"Liger's fused linear GRPO, {fault}": partial(liger, fault=fault) for fault in ("none", "model")},
    **{f"Liger's cross-entropy in Triton, {fault}": partial(liger_triton, fault=fault) for fault in ("none", "model")},
}
MEASURED: dict[str, Callable[[str, Size], Answer]] = {"time of a step": overhead, "peak of allocated memory": memory}
