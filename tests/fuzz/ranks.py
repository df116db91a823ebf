"""Trains the matrix of ranks × parallelism × fault × mode, over and over, and looks for what must not be: a hang, a step that only some ranks
skip, a run that is not the bare one, a fault that no rank reports.

    python tests/fuzz/ranks.py --runs 200          # 200 of them, each on 2 or 4 ranks, in an order that --seed decides
    2 ranks, 96 runs, 141 s: no hang, no finding

A run is one case of `tests/ranks.py`, trained bare and watched; a group of processes does a few dozen of them.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import random
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

SCRIPT = Path(__file__).parents[1] / "ranks.py"
BATCH = 32  # runs of one group of processes
PATIENCE = 30.0  # seconds a run may take before the group is said to hang

FAULTS = (
    "none",
    "loss",
    "loss_raw",
    "loss_all",
    "edge",
    "edge_all",
    "model",
    "model_all",
    "optimizer",
    "clip",
    "clip_all",
    "late",
    "late_all",
)
WHOLE = ("none", "loss_all", "edge_all", "model_all", "clip_all", "late", "optimizer")  # all ranks that share layers have the same loss
KINDS: dict[str, tuple[tuple[int, ...], tuple[str, ...]]] = {  # ranks, faults
    "ddp": ((2, 4), FAULTS),
    "ddp_view": ((2, 4), FAULTS),
    "ddp_micro": ((2, 4), FAULTS),
    "ddp_hook": ((2,), FAULTS),
    "manual": ((2, 4), FAULTS),
    "reducing": ((2, 4), FAULTS),
    "fsdp1": ((2, 4), FAULTS),
    "fsdp1_orig": ((2, 4), FAULTS),
    "fsdp2": ((2, 4), FAULTS),
    "hsdp": ((2, 4), FAULTS),
    "tp": ((2, 4), WHOLE),
    "tp_loss": ((2, 4), ("none", "loss_all", "late")),
    "fsdp2_tp": ((2, 4), ("loss", "edge", "model", "clip", *WHOLE)),
    "pipeline": ((2,), ("none", "loss", "edge", "model", "late", "optimizer")),
    "pipeline_1f1b": ((2,), ("none", "loss", "edge", "model", "late", "optimizer")),
    **{f"deepspeed{stage}": ((2,), ("none", "loss", "edge", "model", "loss_all")) for stage in (0, 1, 2)},
}


STOPS = dict.fromkeys(("none", "loss", "loss_raw", "loss_all", "edge", "edge_all", "model", "model_all", "late", "late_all"), ("stop",))


def matrix() -> dict[int, list[str]]:
    """All cases, by number of ranks."""
    found: dict[int, list[str]] = {2: [], 4: []}
    for kind, (worlds, faults) in KINDS.items():
        if kind.startswith("deepspeed") and importlib.util.find_spec("deepspeed") is None:
            continue
        for world in worlds:
            found[world] += [f"{kind}:{fault}:{mode}" for fault in faults for mode in ("record", "skip", *STOPS.get(fault, ()))]
    return found


def trained(world: int, cases: list[str]) -> tuple[dict[str, list[dict[str, Any]]], str]:
    """Run cases; returns what each rank said of each, and what became of the group if it did not end by itself."""
    with socket.socket() as free, tempfile.TemporaryDirectory() as folder:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.close()
        said = [Path(folder) / f"{rank}.txt" for rank in range(world)]
        group, problem = [], ""
        for rank, path in enumerate(said):
            command = [sys.executable, str(SCRIPT), str(rank), str(world), str(port), folder, *cases]
            with path.open("w") as out:
                group.append(subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env={**os.environ, "OMP_NUM_THREADS": "1"}))
        until = time.monotonic() + PATIENCE * (len(cases) + 4)
        try:
            for process in group:
                if process.wait(timeout=max(1.0, until - time.monotonic())):
                    problem = problem or f"a rank ended with {process.returncode}"
        except subprocess.TimeoutExpired:
            problem = "a hang"
        finally:
            for process in group:
                process.kill()
                process.wait()
        lines = [[json.loads(line) for line in path.read_text().splitlines() if line.startswith('{"case"')] for path in said]
    by_case = [{line["case"]: line for line in own} for own in lines]
    return {case: [own[case] for own in by_case if case in own] for case in cases}, problem


def findings(world: int, case: str, lines: list[dict[str, Any]]) -> Iterator[str]:
    """What must not be, of one run."""
    _, fault, mode = case.split(":")
    if len(lines) < world:
        yield f"{world - len(lines)} ranks never came to its end"
        return
    errors = [line["error"] for line in lines if "error" in line]
    if errors:
        yield errors[0]
        return
    stopped = [line["stopped"] for line in lines]
    if mode == "stop" and (fault == "none") != (not any(stopped)):
        yield f"ranks that ended: {stopped}"
    if mode == "stop" and fault != "none" and "NonFiniteError" not in stopped:
        yield f"no rank was stopped: {stopped}"
    if not any(stopped) and any(line["bare"]["issued"] != line["watched"]["issued"] for line in lines):
        yield "a collective of ours"
    if (mode == "record" or fault == "none") and any(line["bare"] != line["watched"] for line in lines):
        yield "the watched run is not the bare one"
    if len({str(line["skips"]) for line in lines}) > 1:
        yield f"not all ranks skip the same: {[line['skips'] for line in lines]}"
    if fault == "none" and any(line["status"] != "healthy" for line in lines):
        yield f"healthy, and not said so: {[line['status'] for line in lines]}"
    if fault != "none" and not any(line["incidents"] for line in lines):
        yield "bad, and no rank says so"
    if any(gap.endswith("-failed") for line in lines for gap in line["gaps"]):
        yield f"a failure of ours: {[line['gaps'] for line in lines]}"


def main() -> int:
    """Print what was found; the exit status says whether anything was."""
    asked = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    asked.add_argument("--runs", type=int, default=200)
    asked.add_argument("--seed", type=int, default=0)
    asked.add_argument("--minutes", type=float, default=240.0, help="begin no further group after so long")
    options = asked.parse_args()
    cases, order = matrix(), random.Random(options.seed)
    every = [(world, case) for world, own in cases.items() for case in own]
    order.shuffle(every)
    chosen = [every[number % len(every)] for number in range(options.runs)]
    began, found = time.monotonic(), 0
    for world in cases:
        mine = [case for of, case in chosen if of == world]
        done, start = 0, time.monotonic()
        for first in range(0, len(mine), BATCH):
            if time.monotonic() - began > options.minutes * 60:
                break
            batch = sorted(dict.fromkeys(mine[first : first + BATCH]), key=lambda case: "deepspeed" in case)
            lines, problem = trained(world, batch)
            told = [f"{world} ranks, {case}: {finding}" for case in batch for finding in findings(world, case, lines[case])]
            told += [f"{world} ranks: {problem}"] if problem else []
            print("\n".join(told), end="\n" if told else "", flush=True)
            found, done = found + len(told), done + len(batch)
        print(
            f"{world} ranks, {done} runs, {time.monotonic() - start:.0f} s: {'no hang, no finding' if not found else f'{found} findings'}",
            flush=True,
        )
    return int(found > 0)


if __name__ == "__main__":
    raise SystemExit(main())
