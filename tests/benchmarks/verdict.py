"""How long it takes from a bad loss to its verdict, and how much memory, by the size of the batch.

    python tests/benchmarks/verdict.py [ROWSxTOKENS ...]      # by default 64x1024 and 512x8192

         batch   backward      hit   verdict     snapshot    memory
       64x1024      0.00s    0.05s     0.11s        1 MiB     17.2×
      512x8192      0.24s    3.37s     7.60s       64 MiB      1.4×

Each size runs in a process of its own: a GRPO loss with KL over [B, T] log-probabilities, one masked token whose ratio overflows, one
backward pass. "backward" is what the same backward pass takes without nanscope; "hit" is what it takes with the look at the bad step and
its snapshot; "verdict" is diagnosing it with every fix executed. Memory is how far the process went beyond what it held when the loss was
there, over the size of the snapshot. The snapshot itself is in it; against it counts the graph of the loss, some 1.5 ×, which backward
frees before the diagnosis needs most. With a small snapshot it is what is loaded and used for the first time. Linux only.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from torch import Tensor

import nanscope

SIZES = ("64x1024", "512x8192")
MIB = 1 << 20
ENVIRONMENT = {**os.environ, "MALLOC_MMAP_THRESHOLD_": str(MIB)}  # what is freed leaves the process, and is not counted as held


def batch(rows: int, tokens: int) -> tuple[Tensor, ...]:
    """Log-probs of policy, old policy and reference, advantages and mask; one masked token is far off."""
    torch.manual_seed(0)
    log_probs = (-2 * torch.rand(rows, tokens)).requires_grad_()
    old_log_probs = log_probs.detach() + 0.05 * torch.randn(rows, tokens)
    ref_log_probs = log_probs.detach() + 0.1 * torch.randn(rows, tokens)
    mask = (torch.arange(tokens) < torch.randint(tokens // 2, tokens, (rows, 1))).float()
    old_log_probs[rows // 2, tokens - 1] = -200.0
    return log_probs, old_log_probs, ref_log_probs, torch.randn(rows, 1), mask


def loss_of(log_probs: Tensor, old_log_probs: Tensor, ref_log_probs: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    """A GRPO loss with k3 KL, as trainers write it."""
    ratio = torch.exp(log_probs - old_log_probs)
    clipped_ratio = torch.clamp(ratio, 0.8, 1.2)
    per_token_loss = -torch.min(ratio * advantages, clipped_ratio * advantages)
    per_token_kl = torch.exp(ref_log_probs - log_probs) - (ref_log_probs - log_probs) - 1
    return ((per_token_loss + 0.04 * per_token_kl) * mask).sum() / mask.sum()


def memory(field: str) -> int:
    """Bytes that this process holds ("VmRSS"), or has held at most since `forget_peak` ("VmHWM"), as Linux counts them."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return int(re.search(rf"{field}:\s+(\d+) kB", status)[1]) * 1024  # type: ignore[index]


def forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def measure(rows: int, tokens: int) -> dict[str, float]:
    """Run one bad step and return seconds and bytes."""
    tensors = batch(rows, tokens)
    began = time.perf_counter()
    loss_of(*tensors).backward()
    backward = time.perf_counter() - began
    with tempfile.TemporaryDirectory() as folder, nanscope.watch(out=folder) as scope:
        loss = loss_of(*tensors)
        before = memory("VmRSS")
        forget_peak()
        began = time.perf_counter()
        loss.backward()
        hit = time.perf_counter() - began
        began = time.perf_counter()
        verdict = scope.verdict
        diagnosed = time.perf_counter() - began
        size = sum(path.stat().st_size for path in scope.out.glob("*.safetensors"))
    origin = verdict.incidents[0].origin
    if (origin.op, origin.index) != ("exp", (rows // 2, tokens - 1)):
        raise SystemExit(f"the origin came out wrong: {origin.op} {origin.index}")
    return {"backward": backward, "hit": hit, "verdict": diagnosed, "grown": memory("VmHWM") - before, "snapshot": size}


def main() -> None:
    """Measure each size in a process of its own and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sizes", nargs="*", default=SIZES, metavar="ROWSxTOKENS")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        rows, tokens = map(int, options.sizes[0].split("x"))
        print(json.dumps(measure(rows, tokens)))
        return
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads")
    print(f"{'batch':>10} {'backward':>10} {'hit':>8} {'verdict':>9} {'snapshot':>12} {'memory':>9}")
    for size in options.sizes:
        done = subprocess.run([sys.executable, __file__, "--one", size], check=True, capture_output=True, text=True, env=ENVIRONMENT)
        found = json.loads(done.stdout.splitlines()[-1])
        times = f"{found['backward']:>9.2f}s {found['hit']:>7.2f}s {found['verdict']:>8.2f}s"
        print(f"{size:>10} {times} {found['snapshot'] / MIB:>8.0f} MiB {found['grown'] / found['snapshot']:>8.1f}×")


if __name__ == "__main__":
    main()
