"""How long `nanscope report` takes over a run of a thousand ranks, and how much memory.

    python tests/benchmarks/scale.py [--ranks 1024] [--steps 10000] [--out FOLDER] [--keep]
    python tests/benchmarks/scale.py --paper [--seconds 10] [--snapshot 67108864]       # what a run writes in a day, computed

A small run is real: two processes train with DistributedDataParallel, and one of them makes a NaN. From its snapshots, its lines and its
records a run directory of many ranks is written: in the tenth step from the end one rank makes the NaN, most are reached in the same step
by all-reduce, each eighth one step later through the weights. Every second rank was killed and has not counted for itself; the last one
left no file. Then `nanscope report` runs in a process of its own. Times are printed and never judged.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn

import nanscope
from nanscope.snapshot.bad_step import BadStep
from nanscope.snapshot.file import load, save
from nanscope.snapshot.history import Entry, History, last_entries
from nanscope.snapshot.record import RUNNING, Aftermath, RunRecord, records
from nanscope.snapshot.runs import bad_step_files, histories, history_path
from nanscope.snapshot.step import Snapshot
from nanscope.verdict.diagnose import examine
from nanscope.watching.peers import LATELY, near
from nanscope.watching.share import FEW

MIB = 1 << 20
FROM_THE_END = 10  # steps, where the NaN is made
LATER = 8  # each eighth rank is reached a step later
ELSEWHERE = "00000000-1-1"  # the mark of a process that nobody here can ask after


# -- the real run --------------------------------------------------------------------------------------------------------------------------


def loss_of(log_probs: Tensor, mask: Tensor) -> Tensor:
    """A policy loss whose mask may be empty."""
    ratio = torch.exp(log_probs - log_probs.detach())
    return -(ratio * mask).sum() / mask.sum()


def train(rank: int, world: int, bad: int, out: str) -> None:
    """One rank of the real run: five steps, of which the third is bad on the ranks below `bad`."""
    torch.distributed.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Embedding(32, 16), nn.Linear(16, 32)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with nanscope.watch(out=out, name="scale"):
        for step in range(5):
            ids = torch.randint(0, 32, (4, 16))
            log_probs = model(ids[:, :-1]).log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)
            loss = loss_of(log_probs, torch.full_like(log_probs, float(step != 2 or rank >= bad)))
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def real_run(folder: Path, world: int = 2, bad: int = 1) -> Path:
    """Train on so many ranks, of which the first `bad` make a NaN, and return the run directory."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1]), "WORLD_SIZE": str(world), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, __file__, "--train", str(bad), "--out", str(folder)]
    ranks = [subprocess.Popen(command, env={**os.environ, **shared, "RANK": str(rank)}, stderr=subprocess.PIPE) for rank in range(world)]
    try:
        for process in ranks:
            _, error = process.communicate(timeout=120)
            if process.returncode:
                raise SystemExit(error.decode())
    finally:
        for process in ranks:
            process.kill()
    return (folder / "latest").resolve()


# -- the run of many ranks -----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Real:
    """What the small run left. made, came: the bad step of who made it, and of who it came to. after: the step after it, of either.
    line, bad_line: of the history. record: of who it came to."""

    made: Snapshot
    came: Snapshot
    after: tuple[Snapshot, Snapshot]
    line: Entry
    bad_line: Entry
    record: RunRecord

    @staticmethod
    def of(run_dir: Path) -> Real:
        """Read it."""
        found = {(one.rank, one.step): load(path) for path in bad_step_files(run_dir) if (one := BadStep.read(path))}
        made, came, *after = (found[at] for at in ((0, 3), (1, 3), (0, 4), (1, 4)))
        entries = list(last_entries(histories(run_dir)[1, ""]))[::-1]
        return Real(replace(made, found=examine(made)[0]), came, (after[0], after[1]), entries[0], entries[2], records(run_dir)[1])


def write_run(real: Real, folder: Path, ranks: int, steps: int) -> None:
    """Write the run directory of so many ranks."""
    folder.mkdir(parents=True)
    at, first = steps - FROM_THE_END, ranks // 2
    lines = _lines(real, folder, steps, at, "0"), _lines(real, folder, steps, at + 1, "1")
    for rank in range(ranks - 1):
        later = rank % LATER == 1 and rank != first
        own = real.made if rank == first else real.came
        consequence = replace(real.after[0 if rank == first else 1], consequence_of=at)
        bad = [replace(one, rank=rank, step=step) for one, step in ((own, at), (consequence, at + 1)) if step > at or not later]
        for snapshot in bad:
            save(snapshot, folder)
        history_path(folder, rank).write_bytes(lines[later].replace(b'"rank": 0,', b'"rank": %d,' % rank))
        killed = rank % 2 == 1
        known = {"first": BadStep.of_snapshot(bad[0]), "steps": steps, "bad_steps": FROM_THE_END + 1 - later}
        record = replace(real.record, rank=rank, world=ranks, aftermath=(Aftermath(at, at + 1, steps, steps - at),), **known)
        (replace(record, status=RUNNING, process=ELSEWHERE, ended="", steps=at) if killed else record).write(folder)


def _lines(real: Real, folder: Path, steps: int, bad: int, name: str) -> bytes:
    """The history of a rank whose steps are bad from one on."""
    path = folder / f"lines-{name}"
    history = History(path, real.record.run)
    for step in range(1, steps + 1):
        history.append(replace(real.bad_line if step >= bad else real.line, step=step, rank=0))
    history.close()
    found = path.read_bytes()
    path.unlink()
    return found


# -- on paper ------------------------------------------------------------------------------------------------------------------------------


def paper(real: Real, seconds: float, snapshot: int) -> None:
    """Print what a run writes in a day, and at a NaN that reaches all of its ranks. seconds: of a step. snapshot: bytes of one."""
    line = len(json.dumps({**real.line.to_json(), "run": real.record.run})) + 1
    record = len(json.dumps(real.record.to_json(), indent=1))
    print(f"a step takes {seconds:g} s, a line {line} bytes, a record {record} bytes, a snapshot {snapshot / MIB:.0f} MiB")
    worlds = (8, 64, 1024, 10_000)
    rows: list[tuple[str, Callable[[int], float], str]] = [
        ("files", lambda n: 2 * n, ""),
        ("lines a day", lambda n: n * line * 86_400 / seconds / 1e9, "GB"),
        ("lines a second", lambda n: n / seconds, ""),
        ("records at a NaN", lambda n: n * record / 1e6, "MB"),
        ("snapshots at a NaN of one rank", lambda n: (1 + 1 + 2 * min(n - 1, FEW)) * snapshot / 1e9, "GB"),
        ("… if all ranks wrote", lambda n: 2 * n * snapshot / 1e9, "GB"),
        ("snapshots at a NaN that all ranks make", lambda n: 2 * min(n, FEW) * snapshot / 1e9, "GB"),
        ("places asked for then", lambda n: n * FEW if n > FEW else 0, ""),
        ("read by the others at a NaN, a try", lambda n: n * len(near(0, n)) * LATELY / 1e9, "GB"),
        ("… if each read all", lambda n: n * (n - 1) * line * 86_400 / seconds / 2 / 1e9, "GB"),
    ]
    print(f"{'ranks':<40}" + "".join(f"{world:>14,}" for world in worlds))
    for name, figure, unit in rows:
        print(f"{f'{name} [{unit}]' if unit else name:<40}" + "".join(f"{figure(world):>14,.4g}" for world in worlds))


# -- measuring -----------------------------------------------------------------------------------------------------------------------------


def measure(folder: Path) -> dict[str, float]:
    """Run `nanscope report` over a run directory and return seconds and bytes."""
    output = folder.with_suffix(".json")
    began = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, "-m", "nanscope", "report", str(folder), "-o", str(output)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    seconds = time.perf_counter() - began
    if process.returncode != 3:
        raise SystemExit(f"nanscope report left with {process.returncode}")
    told = json.loads(output.read_text())
    causes = sum(1 for incident in told["incidents"] if incident["consequence_of"] is None)
    print(told["sentence"])
    return {"seconds": seconds, "cpu": used.ru_utime + used.ru_stime, "peak": used.ru_maxrss * 1024, "causes": causes}


def main() -> None:
    """Write the run and measure its report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--out", type=Path, help="write there, and not to a temporary folder")
    parser.add_argument("--keep", action="store_true", help="leave the run directory there")
    parser.add_argument("--paper", action="store_true", help="compute what a run writes, and measure nothing")
    parser.add_argument("--seconds", type=float, default=10.0, help="of a step")
    parser.add_argument("--snapshot", type=int, default=64 * MIB, help="bytes of a snapshot")
    parser.add_argument("--train", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.train is not None:
        train(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), options.train, str(options.out))
        return
    with contextlib.ExitStack() as stack:
        out = options.out or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        real = Real.of(real_run(out / "real"))
        if options.paper:
            paper(real, options.seconds, options.snapshot)
            return
        folder = out / "many"
        began = time.perf_counter()
        write_run(real, folder, options.ranks, options.steps)
        sizes = [path.stat().st_size for path in folder.iterdir()]
        written = f"{len(sizes):,} files, {sum(sizes) / 1e9:.2f} GB, in {time.perf_counter() - began:.0f} s"
        print(f"{options.ranks} ranks × {options.steps} steps: {written}")
        found = measure(folder)
        spent = f"{found['seconds']:.1f} s, {found['cpu']:.1f} s of processor time, {found['peak'] / 1e9:.2f} GB at most"
        print(f"nanscope report: {spent}; {found['causes']:.0f} cause")
        if options.out and not options.keep:
            shutil.rmtree(folder)


if __name__ == "__main__":
    main()
