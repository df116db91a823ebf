"""A run that this process has begun: it has a place for all that take part, and tells one verdict of what they wrote."""

from __future__ import annotations

import itertools
import multiprocessing
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import cached_property
from pathlib import Path
from typing import cast

from nanscope.errors import NanscopeError
from nanscope.snapshot.processes import mark
from nanscope.snapshot.record import RunRecord, others, record_of, records, unwatched
from nanscope.snapshot.runs import DEEP_EVERY, Folder
from nanscope.verdict.incident import Verdict
from nanscope.verdict.run import verdict_of
from nanscope.watching.acting import MAX_REPAIRS, OnNonFinite
from nanscope.watching.calling import Ear
from nanscope.watching.invitation import Invitation
from nanscope.watching.job import Job
from nanscope.watching.member import enter
from nanscope.watching.nodes import PATIENCE, Nodes
from nanscope.watching.place import Place, rank_and_world, settle
from nanscope.watching.scope import Scope
from nanscope.watching.strays import Strays

NOBODY = (
    "what the processes did that the script started: none of them reported anything. A Python that cannot import nanscope, "
    "or that runs with -I or -E, is not watched"
)


class Leading:
    """Begins a run. scope: what watches this process in it, until something else does. invitation: for those that take part. hurried: the
    process is about to be ended, and waits for nobody.

    name: what the run is called. job: of several nodes, on each of which it is begun. place: in a run that has begun, see `again`.
    Raises NanscopeError if nothing can be written to `out`.
    """

    def __init__(
        self,
        out: str | os.PathLike[str],
        name: str,
        on_nonfinite: OnNonFinite,
        save_steps: Sequence[int],
        max_bytes: int,
        job: Job | None = None,
        place: Place | None = None,
        deep_every: int = DEEP_EVERY,
        max_repairs: int = MAX_REPAIRS,
        check: bool = False,
    ) -> None:
        job = None if rank_and_world()[1] > 1 else job  # ranks find each other
        self._again = place is not None
        try:
            place = place or settle(Folder.of(out), name, lead=True, job=job)
        except OSError as error:
            raise NanscopeError(f"{out} cannot be written ({error.strerror or error}): choose another --out", slug="not-writable") from None
        self.invitation = Invitation(
            str(place.path),
            str(out),
            place.run,
            on_nonfinite,
            tuple(save_steps),
            max_bytes,
            deep_every,
            node=place.node,
            max_repairs=max_repairs,
            check=check,
        )
        self._nodes = None if job is None else Nodes(place.path, place.node, job)
        self.scope = Scope(
            out=out,
            on_nonfinite=on_nonfinite,
            save_steps=save_steps,
            max_bytes=max_bytes,
            deep_every=deep_every,
            max_repairs=max_repairs,
            check=check,
            name=name,
            place=place,
            invitation=self.invitation,
        )
        self._ear = Ear(self.invitation.called)
        self._began, self._work = os.getpid(), _work_of_children()
        self._entered = self._strayed = self.hurried = False

    @staticmethod
    def again(invitation: Invitation) -> Leading:
        """Go on with a run of this process, which was another program before. What that has said of itself stays."""
        path = Path(invitation.path)
        names = itertools.chain(["", "main"], (f"main-{number}" for number in itertools.count(2)))
        worker = next(name for name in names if not _has_said(record_of(path, 0, name)))
        name = (record_of(path, 0) or RunRecord()).script
        out = invitation.given if Path(invitation.given).absolute() == path.parent else path.parent
        place = Place(path, invitation.run, 0, bool(worker), worker, named=False)
        action, steps, most = cast("OnNonFinite", invitation.on_nonfinite), invitation.save_steps, invitation.max_repairs
        deep, check = invitation.deep_every, invitation.check
        return Leading(out, name, action, steps, invitation.max_bytes, place=place, deep_every=deep, max_repairs=most, check=check)

    def enter(self) -> Callable[[str], None]:
        """Watch this process, and return what ends it. Once something else has watched it meanwhile, it takes part like any other."""
        if self._entered:
            return enter(self.invitation)
        self._entered = True
        self.scope.__enter__()
        return self.scope.leave

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """While it lasts, what others do for the run is looked after."""
        given = nullcontext() if self._again else self.invitation.given_out()  # the program has what its script gave it
        with given, Strays(self._stray).looked_for():
            yield

    def _stray(self, text: str) -> None:
        self._strayed = True
        self.scope.missed("child-processes", text)

    @property
    def tells(self) -> bool:
        """Is this the process that has begun the run, and not one that was forked from it?"""
        return self._began == os.getpid()

    @property
    def reports(self) -> bool:
        """Is this the process that shows the verdict? Of several nodes one does, and all end with its status."""
        return self._nodes is None or self._nodes.is_first()

    @cached_property
    def verdict(self) -> Verdict:
        """On the whole run, once nothing is watched here any more: where it was begun on several nodes, on any of them."""
        if self._nodes is not None:
            missing = self._nodes.missing(self.scope.gather, 0.0 if self.hurried else PATIENCE)
            if missing:
                self.scope.missed("node-unheard", missing)
        out = self.scope.out
        for called in self._outlasting():
            self.scope.missed("outlives-the-run", f"what {called} does from here on: it still runs")
        heard = self._ear.heard()
        for text in heard:
            self.scope.missed("child-unheard", text)
        self.scope.conclude()
        nothing = not (self.scope.steps or self.scope.backwards or self._strayed or heard or others(out))
        if nothing and (_work_of_children() != self._work or _living_children()):
            self.scope.missed("child-processes", NOBODY)
        if self.scope.leads and (others(out) or unwatched(out)):
            return verdict_of(out, shown=self.scope.shown)
        return self.scope.verdict

    def _outlasting(self) -> list[str]:
        """What trains on this machine when the run is over, and nobody will end: `multiprocessing` does so with those that are daemons."""
        end_with_us = {mark(), *(mark(child.pid) for child in multiprocessing.active_children() if child.daemon and child.pid)}
        try:
            running = [record for record in records(self.scope.out) if record.member and record.alive and not record.reaped]
        except NanscopeError:  # said by who reads the run
            return []
        return [one.called for one in running if one.node == self.invitation.node and one.process not in end_with_us]


def _has_said(record: RunRecord | None) -> bool:
    """Does a record say anything that another one in its place would not?"""
    return record is not None and bool(record.steps or record.backwards or record.bad_steps or record.gaps or record.notes)


def _work_of_children() -> float:
    """What processes that have ended took, in page faults: every one takes some."""
    try:
        import resource  # not on Windows
    except ImportError:
        return 0.0
    return resource.getrusage(resource.RUSAGE_CHILDREN).ru_minflt


def _living_children() -> bool:
    return any(path.read_text().strip() for path in Path("/proc/self/task").glob("*/children"))
