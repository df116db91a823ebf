"""What `nanscope run` tells the processes that its script starts, and those that they start: which run they belong to, and how to watch.

NANSCOPE_MEMBER={"path": "/runs/nanscope-runs/2026-11-21T20-15-03-train", "run": "…", "on_nonfinite": "record", …}

It goes through the environment, since that is what a shell, a launcher, `spawn` and `exec` hand on without knowing of it. PYTHONPATH is the
other half: see `children/nanscope_child.py`.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import platform
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from nanscope.plain import checked
from nanscope.snapshot.processes import machine
from nanscope.snapshot.runs import DEEP_EVERY, MAX_BYTES, Folder
from nanscope.watching.acting import ACTIONS, MAX_REPAIRS
from nanscope.watching.calling import call
from nanscope.watching.job import OURS
from nanscope.watching.place import Place, attempt, enrol, is_ranked, name_of

MEMBER = "NANSCOPE_MEMBER"
ROLE = "NANSCOPE_ROLE"  # what a process is called in files and words, given by hand: actor, critic, reference
TORCHRUN_ROLE = "ROLE_NAME"  # the same, as given to torchrun; "default" if it was not

RAY_WORKER = "default_worker.py"  # the script of all of them

CHILDREN = Path(__file__).parent / "children"

ALONE = "MainProcess"


@dataclass(frozen=True, slots=True)
class Invitation:
    """A run that other processes take part in.

    path: its directory, given: its folder of runs as a person wrote it. run: its id. machine: of who began it. on_nonfinite, save_steps,
    max_bytes, deep_every, max_repairs, check: as in `watch`. node: of several on each of which the run was begun, the one that this is for.
    """

    path: str
    given: str
    run: str
    on_nonfinite: str = "record"
    save_steps: tuple[int, ...] = ()
    max_bytes: int = MAX_BYTES
    deep_every: int = DEEP_EVERY
    machine: str = field(default_factory=machine)
    node: str = ""
    max_repairs: int = MAX_REPAIRS
    check: bool = False

    @staticmethod
    def of(environ: Mapping[str, str]) -> Invitation | None:
        """Return what the environment says, None if this process takes part in nobody's run."""
        try:
            found = Invitation(**checked(Invitation, json.loads(environ[MEMBER])))
        except (KeyError, ValueError, TypeError):
            return None
        return found if found.path and found.on_nonfinite in ACTIONS else None

    def to_text(self) -> str:
        """Return what `of` reads."""
        return json.dumps(asdict(self))

    @property
    def called(self) -> str:
        """What the run is called to on this machine."""
        return f"{self.run}-{self.node}"

    def join(self, *, lead: bool = False) -> Place:
        """Return a place in the run that no other process has: by rank, by role, or else by what the process is called.

        lead: the process that began the run, which is called by nothing unless its child has come before. Raises OSError, and who leads
        knows of it.
        """
        try:
            return self._join(lead)
        except OSError as error:
            if not lead:
                call(self.called, f"what {name_of(sys.argv, ())} did, which could not write what it saw ({error.strerror or error})")
            raise

    def _join(self, lead: bool) -> Place:
        role = _plain(os.environ.get(ROLE) or _torchrun_role() or _actor())
        name = multiprocessing.current_process().name
        called = "main" if lead else _plain(name if name != ALONE else name_of(sys.argv, ()))
        if self.node:  # ranks are those of all nodes, and have no need to say on which they are
            called, role = (
                (self.node, self.node) if lead else (f"{called}-{self.node}", role and (role if is_ranked() else f"{role}-{self.node}"))
            )
        if again := "" if lead else attempt():  # all ranks of it, so that each finds the others
            called, role = f"{called}-{again}", "-".join(filter(None, [role, again]))
        names = dict.fromkeys([role if role or lead or is_ranked() else called, called])
        path, folder = Path(self.path), Folder(self.given, Path(self.path).parent)
        elsewhere = self.machine != machine()
        if folder.remote:
            folder = Folder.of(self.given)
            path = folder.path / path.name
            if elsewhere and not is_ranked():  # nobody can see from here which names are taken
                names = dict.fromkeys(f"{name}-{machine()[:4]}" for name in names)
        elif elsewhere and not path.is_dir():
            raise FileNotFoundError(
                f"{self.given} is another folder on this machine ({platform.node()}), so that what trains here is not seen: nodes that "
                f"share no disk need an address that all of them reach, as in --out s3://bucket/runs"
            )
        place = enrol(path, self.run, list(names), folder)
        return replace(place, shared=bool(place.worker) or not lead, led=not lead and not elsewhere, node=self.node)

    @contextmanager
    def given_out(self) -> Iterator[None]:
        """While it lasts, every process that this one starts, and every one that those start, takes part."""
        before = {name: os.environ.get(name) for name in (MEMBER, OURS, "PYTHONPATH")}
        os.environ[MEMBER] = self.to_text()
        os.environ.setdefault(OURS, self.run)
        os.environ["PYTHONPATH"] = os.pathsep.join([*filter(None, [before["PYTHONPATH"]]), str(CHILDREN)])
        sys.path.append(str(CHILDREN))  # `spawn` hands on this one
        try:
            yield
        finally:
            if str(CHILDREN) in sys.path:
                sys.path.remove(str(CHILDREN))
            for name, value in before.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value


def _plain(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9_-]+", "_", name).strip("_")[:40]


def is_reaped() -> bool:
    """Does whoever started this process end it without a word, as Ray does its workers?"""
    return Path(sys.argv[0]).name == RAY_WORKER


def _actor() -> str:
    """What Ray calls the actor of this process, by its name or its class, or else the task that runs in it."""
    ray = sys.modules.get("ray")
    if not is_reaped() or ray is None or not ray.is_initialized():
        return ""
    context = ray.get_runtime_context()
    return str(context.get_actor_name() or (context.get_task_name() or "").partition(".")[0])


def _torchrun_role() -> str:
    role = os.environ.get(TORCHRUN_ROLE, "")
    return "" if role == "default" else role
