"""How something is measured: seconds by two clocks, quartiles, ratios within a round, bits, waits, memory, a process of its own.

A ratio is paired: what a thing took over what the bare one took in the same round. So a machine that is slow for a while is slow for both,
and what "bare again" comes to says how much of a ratio is noise.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nanscope.errors import NanscopeError
from nanscope.verdict.remembered import FOLDER

MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Quartiles:
    """A median and the quartiles around it."""

    median: float
    low: float
    high: float

    @staticmethod
    def of(values: Iterable[float]) -> Quartiles:
        """Return those of some measurements, at least one."""
        found = list(values)
        low, _, high = statistics.quantiles(found, n=4, method="inclusive") if len(found) > 1 else found * 3
        return Quartiles(statistics.median(found), low, high)

    def over(self, scale: float) -> Quartiles:
        """Return them in another unit."""
        return Quartiles(self.median / scale, self.low / scale, self.high / scale)

    def show(self, digits: int = 3) -> str:
        """Return the median and, in brackets, the quartiles."""
        return f"{self.median:.{digits}f} [{self.low:.{digits}f}, {self.high:.{digits}f}]"


@dataclass(frozen=True, slots=True)
class Figures:
    """One row of the result.

    name:        what was measured, the same in every run: a history is held against it.
    seconds:     by the clock, on a GPU by its own events; of one step, call or token, as the words of the subject say.
    ratio:       to the bare one of the same round; where something grows, to the smallest of its kind.
    cpu_ratio:   the same by processor time, which other work on the machine stretches less; None on a GPU.
    peak:        bytes that a process held at most, or on a GPU what torch had allocated.
    peak_ratio:  to the bare one.
    waits:       how often a step waits for the device, None without one.
    """

    name: str
    seconds: Quartiles | None = None
    ratio: Quartiles | None = None
    cpu_ratio: Quartiles | None = None
    peak: float | None = None
    peak_ratio: float | None = None
    waits: int | None = None

    def to_json(self) -> dict[str, Any]:
        """Return as JSON data, without what was not measured."""
        return {name: value for name, value in asdict(self).items() if value is not None}

    @staticmethod
    def from_json(data: dict[str, Any]) -> Figures:
        """Return what `to_json` wrote."""
        found: dict[str, Any] = {name: Quartiles(**value) if isinstance(value, dict) else value for name, value in data.items()}
        return Figures(**found)


class Seconds(NamedTuple):
    """How long something took: by the clock, and of this process's processor time."""

    wall: float
    cpu: float


def seconds_of(function: Callable[[], object], device: str = "cpu") -> Seconds:
    """Time one call; on a GPU between two events of its stream, with the device idle before."""
    if device != "cuda":
        began, began_cpu = time.perf_counter(), time.process_time()
        function()
        return Seconds(time.perf_counter() - began, time.process_time() - began_cpu)
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    torch.cuda.synchronize()
    began_cpu = time.process_time()
    first.record()
    function()
    last.record()
    torch.cuda.synchronize()
    return Seconds(first.elapsed_time(last) * 1e-3, time.process_time() - began_cpu)


def ratios(own: Sequence[Sequence[float]], base: Sequence[Sequence[float]]) -> Quartiles:
    """Return the quartiles of the rounds' ratios, median over median. Of a round whose base took no time at all nothing is known."""
    pairs = [(statistics.median(ours), statistics.median(theirs)) for ours, theirs in zip(own, base, strict=True)]
    return Quartiles.of([ours / theirs for ours, theirs in pairs if theirs > 0] or [float("nan")])


def compared(name: str, own: Sequence[Sequence[Seconds]], base: Sequence[Sequence[Seconds]], per: float = 1, cpu: bool = True) -> Figures:
    """Return the row of something measured in rounds beside the bare one. per: how many of what is counted one measurement holds."""
    return Figures(
        name,
        seconds=Quartiles.of(seconds.wall for group in own for seconds in group).over(per),
        ratio=ratios([[seconds.wall for seconds in group] for group in own], [[seconds.wall for seconds in group] for group in base]),
        cpu_ratio=ratios([[seconds.cpu for seconds in group] for group in own], [[seconds.cpu for seconds in group] for group in base])
        if cpu
        else None,
    )


def rotated(names: Iterable[str], by: int) -> list[str]:
    """Return the names, starting somewhere else."""
    found = list(names)
    return found[by % len(found) :] + found[: by % len(found)]


def bits_equal(left: Sequence[Tensor], right: Sequence[Tensor]) -> bool:
    """Compare tensors as the bytes that they are: -0.0 is not 0.0, and a NaN equals itself."""
    return len(left) == len(right) and all(map(_same_bytes, left, right))


def _same_bytes(left: Tensor, right: Tensor) -> bool:
    if left.shape != right.shape or left.dtype != right.dtype:
        return False
    return torch.equal(left.contiguous().view(-1).view(torch.uint8), right.contiguous().view(-1).view(torch.uint8))


def count_waits(step: Callable[[], object]) -> int:
    """Return how often one step waits for the GPU, by torch's own account."""
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return sum("synchroniz" in str(warning.message) for warning in caught)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Say nothing on the log of bad steps that are meant to be there."""
    log = logging.getLogger("nanscope")
    before, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = before


@contextlib.contextmanager
def nothing_kept() -> Iterator[None]:
    """Diagnose everything anew in here: what was kept is no measure, and what is measured pushes out what a person may want."""
    before = os.environ.get(FOLDER)
    os.environ[FOLDER] = "off"
    try:
        yield
    finally:
        os.environ.pop(FOLDER)
        os.environ.update({} if before is None else {FOLDER: before})


def device_here() -> str:
    """Return what is trained on: "cuda" where there is a GPU, else "cpu"."""
    return "cuda" if torch.cuda.is_available() else "cpu"


# -- memory, as Linux counts it ----------------------------------------------------------------------------------------------------------


def memory(field: str) -> int | None:
    """Return the bytes that this process holds ("VmRSS"), or has held at most ("VmHWM"); None where the system does not tell."""
    try:
        status = Path("/proc/self/status").read_text(encoding="ascii")
    except OSError:
        return None
    found = re.search(rf"{field}:\s+(\d+) kB", status)
    return int(found[1]) * 1024 if found else None


def forget_peak() -> None:
    """Let "VmHWM" count from now on, where the system does."""
    try:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    except OSError:
        return


# -- a process of its own ----------------------------------------------------------------------------------------------------------------


def environment(**more: str) -> dict[str, str]:
    """Return what such a process is given: it finds what this one has imported, takes part in no run, keeps no diagnosis, and has as many
    threads."""
    given = {name: value for name, value in os.environ.items() if not name.startswith("NANSCOPE_")}
    return (
        given
        | {FOLDER: "off", "OMP_NUM_THREADS": str(torch.get_num_threads()), "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        | more
    )


def python(*arguments: str, **more: str) -> subprocess.Popen[str]:
    """Start an interpreter like this one. more: variables of its environment."""
    pipe = subprocess.PIPE
    return subprocess.Popen(
        [sys.executable, "-P", *arguments], env=environment(**more), stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, text=True
    )


def alone(function: str, *arguments: Any, **more: str) -> Any:
    """Run a function of this room in a process of its own, and return what it returned, as JSON has it. function: "asked:of_size"."""
    return answer_of(start(function, *arguments, **more), function)


def start(function: str, *arguments: Any, **more: str) -> subprocess.Popen[str]:
    """Start such a process."""
    return python("-m", "nanscope.bench.alone", function, json.dumps(arguments), str(torch.get_num_threads()), **more)


def answer_of(process: subprocess.Popen[str], what: str) -> Any:
    """Return what such a process has found, as JSON has it."""
    return json.loads(ended(process, what).splitlines()[-1])


def ended(process: subprocess.Popen[str], what: str) -> str:
    """Return what a process printed, when it has ended. Raises NanscopeError with the last line that it said if it failed."""
    out, err = process.communicate()
    if process.returncode:
        said = (err.strip().splitlines() or ["nothing"])[-1]
        raise NanscopeError(f"{what}, in a process of its own, ended with status {process.returncode}: {said}", slug="bench-failed")
    return out
