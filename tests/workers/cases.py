"""What is to be said of a run, how it is compared with what was told, and how a driver is run. Read by the tests and by the tables."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent


@dataclass(frozen=True, slots=True)
class Said:
    """One incident: step and micro-batch, cause, what the code calls it (variable or function), role, element, mask, part of the remedy.

    role: "" is any. of: the step that it follows from. phase, file, module: where it is, "" for anywhere; of a file its name, of a module its end.
    """

    step: int
    micro_batch: int
    cause: str
    name: str
    role: str | None = ""
    index: tuple[int, ...] | None = None
    masked: bool | None = None
    remedy: str = ""
    of: int | None = None
    phase: str = ""
    file: str = ""
    module: str = ""

    def misses(self, told: dict[str, Any]) -> list[str]:
        """Return what an incident says otherwise."""
        found = {
            "step": (told["step"], self.step),
            "micro-batch": (told["micro_batch"], self.micro_batch),
            "cause": (told["cause"], self.cause),
            "role": (told["role"] if self.role != "" else "", self.role),
            "phase": (told["phase"] if self.phase else "", self.phase),
            "file": (Path(told["file"] or "").name if self.file else "", self.file),
            "masked": (told["masked"] if self.masked is not None else None, self.masked),
            "follows from": (told["consequence_of"], self.of),
            "element": (told["index"] if self.index is not None else None, list(self.index) if self.index is not None else None),
        }
        wrong = [f"{what} {said!r}, not {wanted!r}" for what, (said, wanted) in found.items() if said != wanted]
        if self.name and self.name not in (told["variable"], str(told["function"])):
            wrong.append(f"name {told['variable']!r} in {told['function']!r}, not {self.name!r}")
        if not (told["module"] or "").split(" ")[0].endswith(self.module):
            wrong.append(f"module {told['module']!r}, not {self.module!r}")
        if self.remedy and not any(self.remedy in line for line in told["remedies"]):
            wrong.append(f"no remedy {self.remedy!r} in {told['remedies']!r}")
        return wrong


@dataclass(frozen=True, slots=True)
class Expected:
    """One case of a driver: the incidents of the run, none for a healthy one. known: what nanscope says wrong there, "" if all is right.

    kind: of the driver, DRIVER_KIND.py. needs: packages besides the one that the driver is named after. steps: how many the trainer takes.
    error: how the exception begins with which the trainer ends, "" if it does not.
    """

    driver: str
    case: str
    said: tuple[Said, ...] = ()
    ranks: int = 1
    known: str = ""
    kind: str = "worker"
    needs: tuple[str, ...] = ()
    steps: int = 3
    error: str = ""

    def __str__(self) -> str:
        return f"{self.driver}-{self.case}{'' if self.ranks == 1 else f'-{self.ranks} ranks'}"

    @property
    def trainer(self) -> str:
        """What of a case is the trainer, and not the fault."""
        return self.case.rpartition(": ")[0]

    @property
    def missing(self) -> str:
        """Why it cannot be run here, "" if it can."""
        return ", ".join(f"{name} is not installed" for name in (self.driver, *self.needs) if find_spec(name) is None)

    def misses(self, told: dict[str, Any]) -> list[str]:
        """Return what is wrong with what was told, nothing if all is right."""
        if "failed" in told:
            return [told["failed"]]
        wrong = [] if told["same"] else ["the watched run has other weights than the bare one"]
        wrong += [] if told["steps"] == self.steps else [f"{told['steps']} steps"]
        wrong += (
            [] if told["error"].startswith(self.error) and bool(told["error"]) == bool(self.error) else [f"ended with {told['error']!r}"]
        )
        wrong += [f"not seen: {gap}" for gap in told["gaps"]]
        incidents = {(one["step"], one["micro_batch"]): one for one in reversed(told["incidents"])}
        if (told["status"] == "healthy") != (not self.said) or len(incidents) < len(self.said):
            return [*wrong, f"{told['status']}: {told['sentence']}"]
        first = told["incidents"][0] if self.said else {}
        for said in self.said:
            one = first if said is self.said[0] else incidents.get((said.step, said.micro_batch), first)
            harm = told["harm"].get(str(said.step), {})
            wrong += said.misses(one)
            wrong += [f"{what}: {one['reached'][what]}, not {count}" for what, count in harm.items() if one["reached"][what] != count]
        return wrong


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


@cache
def told(table: tuple[Expected, ...], driver: str, ranks: int, out: Path) -> list[dict[str, dict[str, Any]]]:
    """Run all expected cases of a driver in one process a rank; return what each rank was told, by case."""
    own_cases = [one for one in table if (one.driver, one.ranks) == (driver, ranks) and not one.missing]
    cases, script = [one.case for one in own_cases], HERE / f"{driver}_{own_cases[0].kind}.py"
    own = {
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "OMP_NUM_THREADS": "1",
    }
    own = own if own_cases[0].kind == "worker" else {"OMP_NUM_THREADS": "1"}  # a trainer that finds ranks makes a process group
    processes = [
        subprocess.Popen(
            [sys.executable, str(script), str(out / f"{driver}{ranks}"), *cases],
            env={**os.environ, **own, **({"RANK": str(rank), "LOCAL_RANK": str(rank)} if "WORLD_SIZE" in own else {})}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(ranks)
    ]  # fmt: skip
    said = []
    try:
        for process in processes:
            output, error = process.communicate(timeout=1500)
            found = {line["name"]: line for line in map(json.loads, filter(lambda text: text.startswith('{"name"'), output.splitlines()))}
            if process.returncode or len(found) < len(cases):
                raise RuntimeError(error[-3000:])
            said.append(found)
    finally:
        for process in processes:
            process.kill()
    return said
